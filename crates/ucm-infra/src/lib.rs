//! The moving parts of ucm: worker pool with watchdog, rings, sets, completions, clock.
