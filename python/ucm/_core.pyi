"""The compiled core of ucm: conversions between Python and Rust, no logic."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__all__ = [
    "Asked",
    "BlockHasher",
    "Place",
    "QuietSha256",
    "RecordKeys",
    "Sides",
    "Store",
    "Task",
    "TransBuffer",
    "TransDevice",
    "TransMemory",
    "TransStream",
    "__build_type__",
    "__commit_id__",
    "__version__",
    "dot_scores",
    "end_callbacks",
    "hamming_scores",
    "hash_encode",
    "hash_encode_query",
    "hash_scores",
    "hash_select",
    "keep_stages",
    "paged_attention",
    "part_mask",
    "platforms",
    "read_footer",
    "read_header",
    "record_ids",
    "retrieval_isas",
    "retrieval_openmp",
    "run_threads_on",
    "select_blocks",
    "tier_kinds",
    "verify_record",
]

__version__: str
__build_type__: str
__commit_id__: str

@final
class Asked:
    """A lookup on a thread of the store."""

    def answer(self) -> tuple[bytes, str, float] | None:
        """The result of the lookup, with "absent" where all ids are stored, and the seconds until
        that was known; None while it is not. Never waits; raises what the lookup failed with."""

@final
class BlockHasher:
    """Computes the chained keys of the full blocks of a token list."""

    def __new__(
        cls, identity: bytes, block_size: int, hash_method: str = "sha256"
    ) -> BlockHasher: ...
    def hash_blocks(
        self,
        tokens: Any,
        *,
        parent: bytes | None = None,
        start: int = 0,
        extra: Sequence[tuple[int, int, bytes]] | None = None,
    ) -> list[bytes]:
        """Keys of the full blocks from block ``start`` on; ``parent`` is the key of block ``start -
        1``."""

    @property
    def seed(self) -> bytes:
        """The key before the first block."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def hash_method(self) -> str:
        """The hash function's name."""

def part_mask(group: int, pipeline_rank: int, tensor_rank: int) -> bytes:
    """The mask that turns a block key into the record id of one part, and back."""

def record_ids(keys: Sequence[bytes] | bytes, mask: bytes) -> list[bytes]:
    """Record ids of block keys (or the other way round) under a part's mask. The keys may lie end
    to end in one ``bytes``."""

def platforms() -> list[tuple[str, list[str], list[str], str, str]]:
    """Every platform: its name, its other spellings, what vLLM calls it, the type of its devices in
    torch, and a pattern of its device files, or "" without any."""

def tier_kinds() -> str:
    """Every kind of tier as a JSON text: names, role, the schema of its options and their defaults
    in order."""

@final
class RecordKeys:
    """Keys that decrypt records."""

    def __new__(cls, text: str) -> RecordKeys:
        """``text``: each key 64 hex digits on a line of its own; :class:`~ucm.errors.ConfigError`
        for another."""

def read_header(data: bytes) -> tuple[dict[str, Any] | None, str, str]:
    """What the header at the start of these bytes says; else None, the reason why it is refused,
    and what was found."""

def verify_record(
    data: bytes,
    record_id: bytes | None,
    namespace: bytes,
    shape: tuple[list[int], int, int, str] | None,
    keys: RecordKeys | None,
) -> tuple[dict[str, Any] | None, str, str]:
    """Verifies a record read whole: as it is stored, and decrypted and decoded where that is
    possible. ``header``, ``decrypted``, ``decoded`` and ``lost_sides`` (name, reason, what was
    found) of a sound one, else as :func:`read_header`.

    Only what is given is compared: ``namespace`` are the first bytes of the digest, ``shape`` the
    bytes of a layer's tensors, layers, tokens of a block and name of the type.
    """

def read_footer(
    tail: bytes, file_len: int
) -> tuple[tuple[str, bytes, str, list[tuple[bytes, int, int]]] | None, int, str | None]:
    """What the last bytes of a segment of ``file_len`` bytes list: its name, the digest of the
    identity, the part, and id, offset and length of every record; else the length of its footer
    where that begins before them, or the reason why it is refused."""

@final
class Place:
    """A server or a bucket, as the command line sees it."""

    def __new__(cls, kind: str, options: str) -> Place:
        """``kind``: the word of a kind of tier; ``options``: its options as a JSON text."""

    def room(self) -> tuple[int, int, str]:
        """Most bytes that it takes, bytes that it has (0: it does not say), what it is in words."""

    def list(self) -> list[tuple[str, str, int, int, str]]:
        """Everything that lies there: where it would lie below a root (empty: not ours), its name
        on the server, its length, when it was last used (ns since 1970), its version."""

    def read(self, name: str, start: int, length: int) -> bytes | None:
        """Bytes of what has this name, fewer where it ends before; ``None`` where there is
        nothing."""

    def remove(self, item: tuple[str, str, int, int, str]) -> bool:
        """Removes something of ours, as it was listed; false where it is gone, or was used or
        replaced since."""

def keep_stages() -> None:
    """From now on the tasks of this process keep the times of their stages: see :class:`Task`."""

def run_threads_on(processors: Sequence[int]) -> None:
    """Let the threads that the core begins from now on run on these processors, whatever the one
    that begins them is bound to. Raises :class:`~ucm.errors.InvalidInputError` for none, or a
    number beyond 1023."""

@final
class QuietSha256:
    """SHA-256 of pieces of files, computed by threads of the lowest priority, which never take the
    GIL."""

    def __init__(self) -> None: ...
    def update(self, fd: int, offset: int, length: int) -> int:
        """Adds up to ``length`` bytes of an open file from ``offset`` on; how many there were."""

    def digest(self) -> bytes:
        """The digest; nothing can be added after that."""

@final
class Task:
    """A load or dump under way."""

    def check(self, level: str) -> bool:
        """Whether the level was reached or failed; never waits."""

    def wait(self, level: str, timeout: float | None) -> bool:
        """Waits for the level, at most ``timeout`` seconds; false if that time passed first."""

    def shard_done(self, row: int) -> bool:
        """Whether a row of a load has arrived, verified, perhaps before the rest of its block;
        never waits."""

    def wait_shard(self, row: int, timeout: float | None) -> bool:
        """Waits for that, at most ``timeout`` seconds; false if that time passed first, or the row
        will never arrive."""

    def served(self) -> list[int]:
        """Loaded blocks of a load by the stage that had them; final once it is finished."""

    def stages(self) -> dict[str, list[float]]:
        """The stages of its blocks, after :func:`keep_stages`: the first begin and the last end in
        seconds after the task's begin, and the sum of all blocks; final once it is finished."""

    def failures(self) -> dict[int, Any]:
        """The rows that failed, each with its exception."""

@final
class Sides:
    """Side shards being read."""

    @property
    def task(self) -> Task:
        """The task whose row *i* is the *i*-th id."""

    def result(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """The bytes, a row for each id (zeros where it is not there), and for each whether it is
        there; final once the task is finished."""

@final
class Store:
    """An engine over its stages. All sizes in bytes, all times in seconds."""

    def __new__(cls, setup: str) -> Store:
        """``setup``: the description as JSON text."""

    def for_part(self, number: int) -> Store:
        """The same store for the blocks of its part of this number; closing it does nothing."""

    def lookup(self, block_ids: Sequence[bytes]) -> list[bool]:
        """Which ids are stored whole."""

    def explain_on_prefix(self, block_ids: Sequence[bytes]) -> tuple[int, str | None]:
        """How many ids from the first on are stored without a gap, and the reason why the next id
        is no hit; None if every id is one."""

    def answers_at_once(self) -> bool: ...
    def locate_on_prefix(self, block_ids: Sequence[bytes]) -> tuple[bytes, str | None]:
        """The stage that each id from the first on would be read from, a byte each, and why the
        next is no hit."""

    def begin_locate_on_prefix(self, block_ids: Sequence[bytes]) -> Asked:
        """The same on a thread of the store."""

    def locate(self, block_ids: Sequence[bytes]) -> bytes:
        """The stage that each id would be read from, a byte each, 255 for one that is no hit."""

    def begin_locate(self, block_ids: Sequence[bytes]) -> Asked:
        """The same on a thread of the store, with the reason why the first one is no hit."""

    def load(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        timeout: float | None = None,
    ) -> Task:
        """Starts a load; ``timeout`` in seconds, the configured deadline if None."""

    def register_kv(
        self, first: npt.NDArray[np.uint64], stride: npt.NDArray[np.uint64], blocks: int
    ) -> None:
        """Learn where the KV of ``blocks`` blocks lies: piece ``j`` of block ``n`` at ``first[j] +
        n * stride[j]``."""

    def load_blocks(
        self,
        block_ids: Sequence[bytes],
        blocks: npt.NDArray[np.int64],
        timeout: float | None = None,
    ) -> Task:
        """Start a load of whole blocks into device blocks by number."""

    def dump_blocks(
        self,
        block_ids: Sequence[bytes],
        blocks: npt.NDArray[np.int64],
        event: int = 0,
        sides: npt.NDArray[np.uint8] | None = None,
    ) -> Task:
        """Start a dump of whole device blocks by number, or refuse it at once; the rest as of
        :meth:`dump`."""

    def load_sides(
        self, block_ids: Sequence[bytes], name: str, timeout: float | None = None
    ) -> Sides:
        """Starts reading the side shard of that name of each block, without its KV."""

    def dump_sides(
        self, block_ids: Sequence[bytes], sides: Sequence[tuple[str, npt.NDArray[np.uint8]]]
    ) -> Task:
        """Starts writing side shards of blocks that are stored without them, or refuses at once: by
        name the bytes of each, a row for each block."""

    def sides(self) -> list[tuple[str, int, int]]:
        """Side shards that blocks may have here: name, version of the content, bytes."""

    def verify(self, block_ids: Sequence[bytes], timeout: float | None = None) -> Task:
        """Starts reading and verifying whole blocks as a load does, without a place to copy them
        to."""

    def dump(
        self,
        block_ids: Sequence[bytes],
        shard_index: Sequence[int],
        addrs: npt.NDArray[np.uint64],
        event: int = 0,
        sides: npt.NDArray[np.uint8] | None = None,
    ) -> Task:
        """Starts a dump, or refuses it at once. It reads once the event of this handle is done (0:
        at once). ``sides``: for each row its share of every side shard, in their order; copied
        before this returns."""

    def describe(
        self,
        block_ids: Sequence[bytes],
        parents: Sequence[bytes] | None,
        ordinals: Sequence[int] | None,
        tokens: Sequence[int] | None,
        tenant: bytes | None = None,
    ) -> None:
        """Hints for the header: parallel lists of ids, parents, ordinals and token counts, and the
        tag of the tenant whose blocks they are, 32 bytes."""

    def mark_bad(self, block_ids: Sequence[bytes]) -> None:
        """Another rank could not use these records: no hits until the next dump has replaced
        them."""

    def clear_bad(self, block_ids: Sequence[bytes]) -> None:
        """Another rank replaces these records: their refusals are forgotten."""

    def touch(self, block_ids: Sequence[bytes], first: int = 0) -> None:
        """These blocks, in chain order from ordinal ``first`` on, were used."""

    def touch_own(self, block_ids: Sequence[bytes], first: int = 0) -> None:
        """The same for what this process alone can touch."""

    def wants_touch_own(self) -> bool:
        """Whether ``touch_own`` does anything."""

    def prefetch(self, block_ids: Sequence[bytes], priority: str) -> int:
        """Brings blocks into the upper stages; counts those taken on."""

    def cancel_prefetch(self, block_ids: Sequence[bytes]) -> int:
        """These blocks need not be brought up any more; counts those that were still waiting."""

    def flush(self) -> None:
        """Publishes soon what was dumped and waits for more to be published with it."""

    def refresh(self) -> None:
        """Has what others have published listed soon."""

    def free_dump_slots(self) -> int:
        """How many more blocks a dump could take now."""

    def early(self) -> tuple[list[bytes], list[bytes]]:
        """Ids this process can read before others can, added and removed since the last call."""

    def cc_store(self) -> int:
        """Address of the store's C table (``ucm_store.h``): the same every time, refused to calls
        once it is closed."""

    @property
    def record_len(self) -> int:
        """Bytes of one record on the medium."""

    def stats(self) -> str:
        """Counters, gauges and histograms as JSON text."""

    def take_log(self) -> list[tuple[int, str, dict[str, str]]]:
        """What the core logged for this store since the last call: (level of ``logging``, message,
        fields)."""

    def close(self) -> None:
        """Ends the store; repeatable."""

@final
class TransDevice:
    """An open device, for ``ucm.trans``."""

    def __new__(cls, name: str) -> TransDevice:
        """``name``: "host", "cuda:0"."""

    @property
    def name(self) -> str:
        """Its name, with its number."""

    def take_log(self) -> list[tuple[int, str, dict[str, str]]]:
        """What the core logged of devices since the last call: (level of ``logging``, message,
        fields)."""

    def make_stream(self, transfer: str) -> TransStream:
        """A stream that copies this way: auto, dma, sm or staging."""

    def make_buffer(self) -> TransBuffer:
        """Where buffers come from; no pool has any yet."""

@final
class TransBuffer:
    """Buffers of a device and of the host for it. A place is "device" or "host"."""

    def make(self, place: str, size: int) -> TransMemory:
        """A buffer of no pool."""

    def fill(self, place: str, size: int, number: int) -> None:
        """Adds to the pool of this size."""

    def get(self, place: str, size: int, timeout: float | None) -> TransMemory:
        """A buffer from a pool, waited for at most ``timeout`` seconds."""

    def register(self, address: int | TransMemory, size: int) -> None:
        """Pins memory of the caller's."""

    def unregister(self, address: int | TransMemory) -> None:
        """Ends that."""

@final
class TransMemory(Buffer):
    """Some bytes on a device or on the host for it; copies under way keep them.

    ``close()`` or the end of a ``with`` block gives them back. Those on the host can be viewed, as
    by ``numpy.frombuffer(memory, "uint8")``; they stay until the view ends.
    """

    @property
    def address(self) -> int:
        """The address of the first byte; an error once it was given back."""

    @property
    def size(self) -> int:
        """How many bytes may be used."""

    def __index__(self) -> int: ...
    def close(self) -> None:
        """Gives it back to its pool or frees it, once no copy and no view uses it; repeatable."""

    def __enter__(self) -> TransMemory: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class TransStream:
    """A stream of copies; its calls are made one after the other."""

    def copy(
        self,
        shape: str,
        to_device: bool,
        device: Any,
        host: Any,
        size: int,
        number: int | None,
        wait: bool,
    ) -> None:
        """Copies pieces of ``size`` bytes; ``shape`` is "one", "batch" (many addresses on both
        sides) or "together" (many on the device, one buffer on the host). Without ``wait`` it is
        only begun."""

    def append_callback(self, call: Callable[[bool], object]) -> None:
        """Calls a function on the stream's thread when everything submitted before has ended."""

    def synchronize(self, timeout: float | None) -> None:
        """Waits for everything submitted, at most ``timeout`` seconds."""

    def close(self) -> None:
        """Accepts no more jobs; submitted ones are still done, without a wait. Repeatable."""

def end_callbacks() -> None:
    """From now on no stream calls into Python; returns when the callbacks that run have ended."""

# Sparse retrieval; ucm.sparse.retrieval is its face. A tensor is torch's, in the host's memory; how
# a call is run is (init window, local window, threads, instruction set).
_Tensor: TypeAlias = Any
_Run: TypeAlias = tuple[int, int, int, str]

def retrieval_isas() -> list[str]:
    """Instruction sets of this processor, the poorest first."""

def retrieval_openmp() -> bool:
    """Whether calls of several threads run on the threads of an OpenMP runtime of this process."""

def dot_scores(
    query: _Tensor,
    reps: _Tensor,
    scales: _Tensor | None,
    table: _Tensor,
    blocks: _Tensor,
    out: _Tensor,
    words: tuple[str, str, str],
    run: _Run,
) -> None:
    """Scores of blocks from products of queries and representations; ``words`` are the metric and
    what is done over representations ("quest": they are bounds) and heads."""

def hash_encode(
    vectors: _Tensor, weights: _Tensor, codes: _Tensor, slots: _Tensor | None, run: _Run
) -> None:
    """Hash codes of vectors, into pages by slot or one behind the other."""

def hash_encode_query(query: _Tensor, weights: _Tensor, codes: _Tensor, run: _Run) -> None:
    """Hash codes of queries, one for each KV head."""

def hash_scores(
    query: _Tensor,
    weights: _Tensor,
    codes: _Tensor,
    table: _Tensor,
    blocks: _Tensor,
    out: _Tensor,
    heads_apart: bool,
    run: _Run,
) -> None:
    """Scores of blocks from queries and the hash codes of keys."""

def hash_select(
    query: _Tensor,
    weights: _Tensor,
    codes: _Tensor,
    code_table: _Tensor,
    table: _Tensor,
    tokens: _Tensor,
    budgets: Sequence[int],
    kept: tuple[_Tensor, _Tensor, _Tensor, _Tensor],
    heads_apart: bool,
    run: _Run,
) -> None:
    """The blocks that rows keep, by hash codes. See :func:`ucm.sparse.retrieval.hash_select`."""

def hamming_scores(
    queries: _Tensor,
    codes: _Tensor,
    table: _Tensor,
    tokens: _Tensor,
    out: _Tensor,
    heads_apart: bool,
    run: _Run,
) -> None:
    """Scores of blocks from hash codes."""

def select_blocks(
    scores: _Tensor,
    table: _Tensor,
    tokens: _Tensor,
    block_size: int,
    budgets: Sequence[int],
    kept: tuple[_Tensor, _Tensor, _Tensor, _Tensor],
    run: _Run,
) -> None:
    """The best blocks of every row, into (table, logical places, counts, tokens)."""

def paged_attention(
    query: _Tensor,
    pages: _Tensor,
    table: _Tensor,
    tokens: _Tensor,
    out: _Tensor,
    scale: float,
    run: _Run,
    rule: tuple[_Tensor, int, float] | None = None,
) -> None:
    """Decode attention over a block table, by a rule of ReRoPE where there is one."""
