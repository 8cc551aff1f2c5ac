//! What the product is: records, backends, the engine, space and health.
