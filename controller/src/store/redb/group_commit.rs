//! Writes that wait at the same time share one commit: a commit waits for the disk, however much is in it.
//!
//! Each caller puts its write into the queue. One of those that wait commits the writes at the front of the
//! queue, its own or not, and leaves each answer with its caller. They take effect in the order of the queue.
//! One commit has at most one write of an object, so that each write is compared with the versions that were
//! committed before.

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use shorthorn_controller_core::objects::{Key, Object, ResourceVersion};

use super::lock;
use crate::store::ObjectStoreError;

/// The most writes in one commit. As many callers can wait as there are threads for them.
const WRITES_MAX: usize = 512;

/// A change of one object.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // few wait at a time, and nearly all are of the large kind
pub(super) enum Write {
    Put(Object),
    /// Removes the object if it has that version.
    Remove(Key, Option<ResourceVersion>),
}

impl Write {
    pub(super) fn key(&self) -> Key {
        match self {
            Write::Put(object) => object.key(),
            Write::Remove(key, _) => key.clone(),
        }
    }
}

/// The stored object; none: it was removed.
pub(super) type WriteResult = Result<Option<Object>, ObjectStoreError>;

/// The place where the caller of a write finds its answer.
type AnswerSlot = Arc<Mutex<Option<WriteResult>>>;

/// A write, and where its caller finds the answer.
#[derive(Debug)]
struct WaitingWrite {
    write: Write,
    answer: AnswerSlot,
}

/// Writes whose commit has not begun.
#[derive(Debug, Default)]
struct CommitQueue {
    waiting: VecDeque<WaitingWrite>,
    /// True if a caller commits; all others wait for that.
    is_committing: bool,
}

/// The callers that wait, one of which commits at a time.
#[derive(Debug)]
pub(super) struct GroupCommit {
    /// The file, for errors.
    path: PathBuf,
    queue: Mutex<CommitQueue>,
    /// A commit has ended.
    committed: Condvar,
}

impl GroupCommit {
    pub(super) fn new(path: PathBuf) -> GroupCommit {
        GroupCommit { path, queue: Mutex::default(), committed: Condvar::new() }
    }

    /// Returns once the write is durable, or refused. `commit` commits some writes, and returns their answers
    /// in the same order.
    pub(super) fn write(
        &self,
        write: Write,
        mut commit: impl FnMut(Vec<Write>) -> Vec<WriteResult>,
    ) -> WriteResult {
        let answer = AnswerSlot::default();
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(WaitingWrite { write, answer: Arc::clone(&answer) });
        loop {
            if let Some(answer) = lock(&answer).take() {
                return answer;
            }
            if queue.is_committing {
                queue = self.committed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            queue.is_committing = true;
            let batch = next_batch(&mut queue.waiting);
            drop(queue);
            let (writes, answers) = batch.into_iter().map(|waiting| (waiting.write, waiting.answer)).unzip();
            let commit_guard = CommitGuard { group: self, answers };
            for (slot, answer) in commit_guard.answers.iter().zip(commit(writes)) {
                *lock(slot) = Some(answer);
            }
            drop(commit_guard);
            queue = lock(&self.queue);
        }
    }

    /// Lets writes wait until the guard is dropped.
    #[cfg(test)]
    pub(super) fn hold(&self) -> CommitGuard<'_> {
        lock(&self.queue).is_committing = true;
        CommitGuard { group: self, answers: Vec::new() }
    }

    /// Returns the number of writes whose commit has not begun.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        lock(&self.queue).waiting.len()
    }
}

/// Held by the caller that commits. Its end wakes all others, also after a panic.
pub(super) struct CommitGuard<'a> {
    group: &'a GroupCommit,
    answers: Vec<AnswerSlot>,
}

impl Drop for CommitGuard<'_> {
    fn drop(&mut self) {
        for answer in &self.answers {
            lock(answer).get_or_insert_with(|| {
                let message = "the commit of this write was cut off".to_owned();
                Err(ObjectStoreError::Write { path: self.group.path.clone(), message })
            });
        }
        lock(&self.group.queue).is_committing = false;
        self.group.committed.notify_all();
    }
}

/// The writes at the front of the queue, up to the second one of an object.
fn next_batch(queue: &mut VecDeque<WaitingWrite>) -> Vec<WaitingWrite> {
    let (mut keys, mut batch) = (BTreeSet::new(), Vec::new());
    while batch.len() < WRITES_MAX {
        let Some(next) = queue.pop_front() else { break };
        if !keys.insert(next.write.key()) {
            queue.push_front(next);
            break;
        }
        batch.push(next);
    }
    batch
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use shorthorn_controller_core::objects::Kind;

    use super::*;

    fn remove(name: &str) -> Write {
        Write::Remove(Key::new(Kind::Node, name), ResourceVersion::new(1))
    }

    /// Puts these writes into the queue, in this order, while another caller commits. Returns the answers,
    /// and the number of writes in each commit.
    fn at_once(
        writes: Vec<Write>,
        commit: impl Fn(Vec<Write>) -> Vec<WriteResult> + Sync,
    ) -> (Vec<WriteResult>, Vec<usize>) {
        let group = GroupCommit::new("store".into());
        let sizes = Mutex::new(Vec::new());
        let counted = |batch: Vec<Write>| {
            lock(&sizes).push(batch.len());
            commit(batch)
        };
        let answers = std::thread::scope(|scope| {
            let guard = group.hold();
            let mut threads = Vec::new();
            let (group, counted) = (&group, &counted);
            for (before, write) in writes.into_iter().enumerate() {
                threads.push(scope.spawn(move || group.write(write, counted)));
                while group.waiting() == before {
                    std::thread::yield_now();
                }
            }
            drop(guard);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (answers, sizes.into_inner().unwrap())
    }

    #[test]
    fn a_commit_has_all_that_wait_up_to_the_second_write_of_an_object() {
        let writes = ["a", "b", "a", "c"].map(remove).into();
        let (answers, sizes) = at_once(writes, |batch| batch.iter().map(|_| Ok(None)).collect());
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        assert_eq!(sizes, [2, 2]);
    }

    #[test]
    fn each_caller_gets_its_own_answer() {
        let refuse = |write: Write| match write.key() {
            key if key.name == "a" => {
                let (expected, found) = (ResourceVersion::new(1), ResourceVersion::new(2));
                Err(ObjectStoreError::Conflict { key, expected, found })
            }
            _ => Ok(None),
        };
        let writes = ["a", "b", "c"].map(remove).into();
        let (answers, sizes) = at_once(writes, |batch| batch.into_iter().map(refuse).collect());
        assert_eq!(answers.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true, true]);
        assert_eq!(sizes, [3]);
    }

    #[test]
    fn a_commit_without_answers_is_an_error_for_all_its_callers() {
        let (answers, _) = at_once(["a", "b"].map(remove).into(), |_| Vec::new());
        for answer in answers {
            assert!(
                matches!(&answer, Err(ObjectStoreError::Write { message, .. }) if message.contains("cut off"))
            );
        }
    }

    #[test]
    fn the_next_caller_commits_after_a_panic() {
        let group = GroupCommit::new("store".into());
        let panicked = catch_unwind(AssertUnwindSafe(|| group.write(remove("a"), |_| panic!("on purpose"))));
        assert!(panicked.is_err());
        assert!(group.write(remove("a"), |batch| batch.iter().map(|_| Ok(None)).collect()).is_ok());
    }
}
