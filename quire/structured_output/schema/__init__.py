"""JSON Schema: what a schema is, what of it a library honours, and a schema written anew. Pure; loads no library.

`keywords` (their names, and the walk over schemas in a schema), `well_formed` (is it one?), `problems` (what a library
would not honour), `regex` and `references` (the same of patterns and `$ref`); `forms`, `additional_properties`,
`patterns`, `lengths` and `formats` write a schema in the form that libraries read alike.
"""
