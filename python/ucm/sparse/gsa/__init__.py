"""GSA, by the names of the original, of the book and of document 002."""
