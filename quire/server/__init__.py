"""The application around one engine, with the routes of every API, and what runs it."""
