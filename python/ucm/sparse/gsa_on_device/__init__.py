"""GSA On-Device, by the names of the original and of the book."""
