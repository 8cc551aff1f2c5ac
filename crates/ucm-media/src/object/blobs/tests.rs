//! The suite of every medium, over a bucket in memory.

use object_store::memory::InMemory;
use ucm_infra::{Lane, SystemClock};

use super::*;
use crate::blobs::conformance::{check_blobs, scope};
use crate::object::bucket::tests::bucket_over;
use crate::object::{BucketConfig, ObjectConfig};

fn blobs(store: &Arc<InMemory>, writer: u64) -> Arc<BucketBlobs> {
    let scope = scope(writer);
    let lengths = Arc::new(scope.lengths());
    let config = ObjectConfig {
        place: BucketConfig {
            url: "s3://bucket/p".to_owned(),
            endpoint: Some("http://127.0.0.1:1".to_owned()),
            ..BucketConfig::default()
        },
        scope,
        capacity: Some(1 << 30),
        expire_after: None,
        size: 1 << 20,
        age: Duration::from_secs(1),
        refresh: Duration::from_secs(1),
    };
    let mut remote = Remote::new(config, SystemClock::shared()).unwrap();
    remote.bucket = bucket_over(store);
    let lane = |name| Lane {
        name,
        capacity: 8,
        max_running: 2,
    };
    let pool = WorkerPool::builder("test")
        .size(2)
        .lanes(&[lane("a"), lane("b"), lane("c"), lane("upload")])
        .build()
        .unwrap();
    let blobs = BucketBlobs::new(&Arc::new(remote), &lengths, &pool);
    let deadline = blobs.remote.clock.now().after(Duration::from_secs(60));
    blobs.begin_writing(deadline).unwrap();
    let _ = blobs.space.turn(); // nothing is granted before it was counted
    Arc::new(blobs)
}

#[test]
fn a_bucket_is_a_medium_of_segments() {
    let (store, writers) = (Arc::new(InMemory::new()), AtomicU64::new(1));
    let make = || blobs(&store, writers.fetch_add(1, Ordering::Relaxed));
    check_blobs(&make, false);
}
