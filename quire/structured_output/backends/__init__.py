"""One file for each library that makes grammars; each is imported only when a request needs it."""
