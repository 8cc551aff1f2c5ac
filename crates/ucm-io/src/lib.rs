//! How bytes reach files: the I/O engine seam, its thread-pool engine and its fault-injecting twin.
