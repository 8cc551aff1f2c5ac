//! The words of ucm: identifiers, sizes, identity, errors, reasons, hashing and checksums.
