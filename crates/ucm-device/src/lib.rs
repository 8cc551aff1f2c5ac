//! Where KV lives: devices, streams, the host arena and its slots.
