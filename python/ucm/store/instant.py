"""Base of stores that move no bytes: their tasks are over before they are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ucm.errors import ClosedError, InvalidInputError, TaskError, UcmError
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1, Until


class InstantTask(Task):
    """A load or dump that ended at once, with these failures by row."""

    def __init__(self, kind: str, failures: dict[int, UcmError]) -> None:
        super().__init__()
        self.kind, self.failures, self.completed = kind, failures, True


class InstantStore(UcmKVStoreBaseV1):
    """Waiting and checking for such tasks, and the checks of arguments."""

    has_staged_level = True

    def wait(self, task: Any, timeout: float | None = None, until: Until = "published") -> None:
        """Never waits. Raises :class:`~ucm.errors.TaskError` for a task that failed."""
        del timeout, until
        failed: TaskError | None = None
        for one in task if isinstance(task, list | tuple) else [task]:
            failures = _instant(one).failures
            if failures:
                first = min(failures)
                one.error = TaskError(
                    f"{len(failures)} rows of the {one.kind} failed, the first: {failures[first]}",
                    failures=failures,
                    context={"row": first},
                )
                failed = failed or one.error
        if failed is not None:
            raise failed

    def check(self, task: Any, until: Until = "published") -> bool:
        """Always."""
        del until
        return _instant(task).completed

    def checked(self, block_ids: Sequence[Any]) -> Sequence[bytes]:
        """The ids, if each is one and the store is open."""
        if self._closed:
            raise ClosedError("the store is closed")
        for block in block_ids:
            if not isinstance(block, bytes) or len(block) != 16:
                raise InvalidInputError(
                    "a block id is 16 raw bytes (type bytes)", context={"got": repr(block)[:80]}
                )
        return block_ids

    def rows(self, block_ids: Sequence[bytes], shard_index: Sequence[int], addrs: Any) -> int:
        """The number of rows, if it is the same everywhere."""
        rows = len(self.checked(block_ids))
        if not rows == len(shard_index) == len(addrs):
            raise InvalidInputError(
                "block_ids, shard_index and the rows of addrs must be equally many",
                context={"block_ids": rows, "shard_index": len(shard_index), "addrs": len(addrs)},
            )
        return rows


def _instant(task: Any) -> InstantTask:
    if not isinstance(task, InstantTask):
        raise InvalidInputError(
            "this is no task of this store", context={"type": type(task).__name__}
        )
    return task
