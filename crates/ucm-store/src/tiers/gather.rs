//! Asking every stage for the same thing and putting the answers together.

use std::collections::BTreeMap;
use std::sync::Arc;

use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Mono;

use super::Shared;
use super::stage::Stage;
use crate::backend::{Done, Listed};

/// Asks one stage.
type Ask<T> = Box<dyn Fn(&Stage, Done<T>) + Send + Sync>;

/// How one stage is asked, and how two answers are put together.
pub(super) struct Question<T> {
    pub(super) ask: Ask<T>,
    pub(super) join: fn(T, T) -> T,
    pub(super) deadline: Mono,
}

impl Shared {
    /// Asks the stages from the top down, one after the other; one that answers is enough.
    pub(super) fn gather<T: Send + 'static>(self: &Arc<Self>, question: Question<T>, done: Done<T>) {
        let off = Error::new(ErrorKind::Unhealthy, "every tier is switched off for now");
        self.gather_from(0, Arc::new(question), Err(off), done);
    }

    fn gather_from<T: Send + 'static>(
        self: &Arc<Self>,
        from: usize,
        question: Arc<Question<T>>,
        so_far: Result<T>,
        done: Done<T>,
    ) {
        let now = self.clock.now();
        let Some(number) = (from..self.stages.len()).find(|&number| self.admits(number, now)) else {
            return done(so_far);
        };
        let (shared, next) = (Arc::clone(self), Arc::clone(&question));
        let answered = move |result: Result<T>| {
            shared.note(number, next.deadline, result.as_ref().err());
            let joined = match (so_far, result) {
                (Ok(one), Ok(other)) => Ok((next.join)(one, other)),
                (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(one),
                (Err(_), Err(error)) => Err(error),
            };
            shared.gather_from(number + 1, next, joined, done);
        };
        (question.ask)(&self.stages[number], Box::new(answered));
    }
}

/// Records of both lists, each once, with its latest use.
pub(super) fn union(one: Vec<Listed>, other: Vec<Listed>) -> Vec<Listed> {
    let mut records: BTreeMap<_, Listed> = one.into_iter().map(|record| (record.id.0, record)).collect();
    for record in other {
        let known = records.entry(record.id.0).or_insert(record);
        known.used_ns = known.used_ns.max(record.used_ns);
    }
    records.into_values().collect()
}

#[cfg(test)]
mod tests {
    use ucm_core::BlockId;

    use super::*;

    #[test]
    fn each_record_once_with_its_latest_use() {
        let listed = |n: u8, used_ns| Listed {
            id: BlockId([n; 16]),
            len: 1,
            used_ns,
        };
        let all = union(vec![listed(1, 5), listed(2, 7)], vec![listed(3, 1), listed(1, 9)]);
        assert_eq!(all, [listed(1, 9), listed(2, 7), listed(3, 1)]);
    }
}
