/*
 * ucm_store.h: a store of ucm for native callers, without Python in between.
 *
 * In Python, `store.cc_store()` gives the address of a `struct ucm_store` as an integer, or 0 where a store has none.
 * A native program casts it to `const struct ucm_store *`, reads `version` and calls the functions it points to,
 * with the field `store` as their first argument:
 *
 *     const struct ucm_store *s = (const struct ucm_store *)address;
 *     if (s->version != UCM_STORE_VERSION || s->size < sizeof(struct ucm_store)) return -1;
 *     uint64_t task;
 *     int32_t code = s->load(s->store, ids, shards, addrs, rows, s->pieces_per_shard, UCM_OWN_DEADLINE, &task);
 *     if (code != UCM_OK) return code;
 *     code = s->wait(s->store, task, UCM_PUBLISHED, UCM_OWN_DEADLINE);
 *     s->release(s->store, task);
 *
 * Nothing needs to be linked. The header is C11 and C++17 and includes nothing but the standard's integer types.
 *
 * Lifetime. The table is there as long as the process is: after the store was closed, or Python has dropped it, every
 * call through it returns UCM_CLOSED, and in a child after fork() UCM_FORKED. So the order in which the two sides end
 * does not matter. Tables are not given back; a process can have 65536 of them in its life.
 *
 * Threads. Every function may be called from any thread at any time, also while the store is being closed. None takes
 * Python's GIL. Only `wait` waits for I/O as long as it is told; `lookup` and `lookup_on_prefix` wait at most for the
 * store's lookup deadline; all others return at once.
 *
 * Results. UCM_OK is 0, UCM_PENDING is 1 (not an error: not finished yet), errors are negative. A call that fails has
 * written nothing through its arguments, and `last_error` has the story in words for the thread that made it.
 *
 * Pointers must be valid for the whole call and aligned to their type. Block ids are 16 bytes each, one after the
 * other, without any meaning to the store; the connector of vLLM uses record ids (block key XOR part mask).
 */
#ifndef UCM_STORE_H
#define UCM_STORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a field changes its meaning or its place. A table that only grows keeps its version; see `size`. */
#define UCM_STORE_VERSION 1u

/* Bytes of a block id. */
#define UCM_ID_SIZE 16

/* Not errors. */
#define UCM_OK 0
#define UCM_PENDING 1

/* Errors. Those marked with * may go away by themselves: the same call can be made again later. */
#define UCM_INTERNAL (-1)         /* a promise of ucm's own code was broken; please report */
#define UCM_INVALID_INPUT (-50000) /* an argument is wrong: null, not aligned, out of range, an unknown task */
#define UCM_IO (-50002)           /* * the operating system refused */
#define UCM_BUSY (-50004)         /* * no slot or place in a queue is free; nothing was begun */
#define UCM_NOT_FOUND (-50005)    /* a block that was to be loaded is not stored */
#define UCM_UNSUPPORTED (-50008)  /* not in this build, or not by this store */
#define UCM_NO_SPACE (-50009)     /* * the medium or its configured limit is full */
#define UCM_TIMEOUT (-50010)      /* * the deadline of the load or dump passed: it has ended without success */
#define UCM_CORRUPT (-50011)      /* what is stored failed its checksums: as good as not stored */
#define UCM_FOREIGN (-50012)      /* what is stored belongs to another identity, part, id or format */
#define UCM_UNHEALTHY (-50013)    /* * the storage is switched off for a while after repeated failures */
#define UCM_CLOSED (-50014)       /* the store was closed */
#define UCM_FORKED (-50015)       /* this process is a child of the one that opened the store */

/* Levels of a dump. A load has one, and both mean its end. */
#define UCM_PUBLISHED 0u /* visible to others, survives this process */
#define UCM_STAGED 1u    /* the source may be used again */

/* As a timeout: as long as the store is configured to wait. 0 does not wait at all. */
#define UCM_OWN_DEADLINE UINT64_MAX

struct ucm_store {
    uint32_t version; /* UCM_STORE_VERSION of the library */
    uint32_t size;    /* bytes of the library's struct: a field whose end lies beyond it is not there */
    void *store;      /* first argument of every function below; what it points to is ucm's */

    /* The shape of a block, fixed when the store was opened. Sizes in bytes. */
    uint64_t block_size;         /* shard_size * shards_per_block */
    uint64_t shard_size;         /* what one row of a load or dump moves: the sum of its pieces */
    uint32_t shards_per_block;
    uint32_t pieces_per_shard;   /* addresses in a row */
    const uint64_t *piece_sizes; /* pieces_per_shard of them */

    /* Which of `count` blocks are stored whole: found[i] becomes 1 or 0, exact for each id. */
    int32_t (*lookup)(void *store, const uint8_t *ids, size_t count, uint8_t *found);

    /* How many blocks from the first on are stored without a gap: *present becomes 0 to count. */
    int32_t (*lookup_on_prefix)(void *store, const uint8_t *ids, size_t count, size_t *present);

    /*
     * Starts reading. Row i fills the memory at addrs[i * pieces + 0 .. pieces - 1] with the pieces of shard shards[i]
     * of block ids[16 * i ..]. `pieces` is pieces_per_shard. The memory belongs to the task until `wait` or `check`
     * reported its end. It ends at the latest shortly after its deadline, `timeout_ns` from now; not one byte is
     * written after that. What the memory of a failed row holds then is undefined. The arrays themselves may be
     * used again at once. *task is a number other than 0, to be released.
     */
    int32_t (*load)(void *store, const uint8_t *ids, const uint32_t *shards, const uint64_t *addrs, size_t rows,
                    size_t pieces, uint64_t timeout_ns, uint64_t *task);

    /*
     * Starts writing, or refuses at once (UCM_BUSY: no slot is free; the source was not touched). The source must not
     * change until UCM_STAGED. A block is published when the last of its shards was dumped; it is dropped when that
     * does not happen within the store's dump deadline. Dumping a block that is stored already does nothing.
     */
    int32_t (*dump)(void *store, const uint8_t *ids, const uint32_t *shards, const uint64_t *addrs, size_t rows,
                    size_t pieces, uint64_t *task);

    /* Whether a task has reached a level or failed, without waiting: *finished becomes 1 or 0. */
    int32_t (*check)(void *store, uint64_t task, uint32_t until, uint8_t *finished);

    /*
     * Waits for a level, at most `timeout_ns`. UCM_OK: reached, every row is well. UCM_PENDING: not within that time.
     * An error: the level was reached, and this is the error of the first failed row. Repeatable.
     */
    int32_t (*wait)(void *store, uint64_t task, uint32_t until, uint64_t timeout_ns);

    /*
     * The rows of a task that failed so far, at most `capacity` of them, in order: rows[i] and its error codes[i].
     * *count becomes the number of all that failed. Rows that are not named are well once the task has ended.
     */
    int32_t (*failures)(void *store, uint64_t task, size_t *rows, int32_t *codes, size_t capacity, size_t *count);

    /*
     * Forgets a task; its number means nothing afterwards. It does not end the task: memory it may still use stays in
     * use until its deadline. At most 65536 tasks may be unreleased, then UCM_BUSY.
     */
    int32_t (*release)(void *store, uint64_t task);

    /*
     * Counters, gauges and histograms as JSON, UTF-8. At most capacity - 1 bytes and a zero are written to `text`,
     * which may be null; *length becomes the length of the whole text without the zero.
     */
    int32_t (*stats)(void *store, char *text, size_t capacity, size_t *length);

    /*
     * The story of the last error of a call of this thread, through any table, in the same way; returns its whole
     * length, 0 when there was none.
     */
    size_t (*last_error)(char *text, size_t capacity);
};

#ifdef __cplusplus
}
#endif

#endif /* UCM_STORE_H */
