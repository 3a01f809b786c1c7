"""Names of other engines over Quire, for programs that were written for those."""
