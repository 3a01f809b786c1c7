"""The `quire` command: one module per subcommand, imported only when chosen."""
