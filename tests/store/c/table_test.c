/*
 * Uses a store of ucm as a native program does: through the table alone. Compiled by test_cc_store.py as a shared
 * library and called in the process that opened the store. Every function returns 0, or the line of the check that
 * failed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ucm_store.h"

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            char said[512];                                                               \
            s->last_error(said, sizeof said);                                             \
            fprintf(stderr, "line %d: %s (last error: %s)\n", __LINE__, #condition, said); \
            return __LINE__;                                                              \
        }                                                                                 \
    } while (0)

#define BLOCKS 4

/* What the library and this header agree on. */
int table_layout(const struct ucm_store *s)
{
    CHECK(s->version == UCM_STORE_VERSION);
    CHECK(s->size == sizeof(struct ucm_store));
    CHECK(s->store != NULL);
    CHECK(s->shard_size * s->shards_per_block == s->block_size);
    uint64_t sum = 0;
    for (uint32_t piece = 0; piece < s->pieces_per_shard; piece++) {
        sum += s->piece_sizes[piece];
    }
    CHECK(sum == s->shard_size);
    return 0;
}

/* Ids that differ from those of every other seed. */
static void make_ids(uint8_t *ids, uint32_t seed)
{
    for (uint32_t block = 0; block < BLOCKS; block++) {
        memset(ids + UCM_ID_SIZE * block, (int)(block + 1), UCM_ID_SIZE);
        memcpy(ids + UCM_ID_SIZE * block, &seed, sizeof seed);
    }
}

/* Rows for all shards of all blocks, over memory that holds the blocks one after the other. */
static void make_rows(const struct ucm_store *s, const uint8_t *ids, const uint8_t *memory, uint8_t *row_ids,
                      uint32_t *shards, uint64_t *addrs)
{
    size_t row = 0;
    for (uint32_t block = 0; block < BLOCKS; block++) {
        for (uint32_t shard = 0; shard < s->shards_per_block; shard++, row++) {
            memcpy(row_ids + UCM_ID_SIZE * row, ids + UCM_ID_SIZE * block, UCM_ID_SIZE);
            shards[row] = shard;
            uint64_t at = (uint64_t)(uintptr_t)memory + block * s->block_size + shard * s->shard_size;
            for (uint32_t piece = 0; piece < s->pieces_per_shard; piece++) {
                addrs[row * s->pieces_per_shard + piece] = at;
                at += s->piece_sizes[piece];
            }
        }
    }
}

/* Dumps blocks, finds them, loads them into other memory and compares. */
int table_round_trip(const struct ucm_store *s, uint32_t seed)
{
    size_t rows = (size_t)BLOCKS * s->shards_per_block, bytes = (size_t)(BLOCKS * s->block_size);
    uint8_t ids[UCM_ID_SIZE * BLOCKS], found[BLOCKS], finished = 7;
    uint8_t *source = malloc(bytes), *target = calloc(1, bytes), *row_ids = malloc(UCM_ID_SIZE * rows);
    uint32_t *shards = malloc(rows * sizeof *shards);
    uint64_t *addrs = malloc(rows * s->pieces_per_shard * sizeof *addrs), task = 0, other = 0;
    size_t present = 99, count = 99, bad_rows[2];
    int32_t codes[2], code;
    char text[256];
    CHECK(source && target && row_ids && shards && addrs);
    for (size_t at = 0; at < bytes; at++) {
        source[at] = (uint8_t)(at * 31 + seed + at / 251);
    }
    make_ids(ids, seed);

    CHECK(s->lookup(s->store, ids, BLOCKS, found) == UCM_OK);
    CHECK(found[0] == 0 && found[BLOCKS - 1] == 0);
    CHECK(s->lookup_on_prefix(s->store, ids, BLOCKS, &present) == UCM_OK && present == 0);

    make_rows(s, ids, source, row_ids, shards, addrs);
    CHECK(s->dump(s->store, row_ids, shards, addrs, rows, s->pieces_per_shard, &task) == UCM_OK);
    CHECK(task != 0);
    memset(row_ids, 0, UCM_ID_SIZE * rows); /* the arrays were read */
    CHECK(s->wait(s->store, task, UCM_STAGED, UCM_OWN_DEADLINE) == UCM_OK);
    uint8_t *copy = malloc(bytes);
    CHECK(copy);
    memcpy(copy, source, bytes);
    memset(source, 0, bytes); /* and so was the source */
    while ((code = s->wait(s->store, task, UCM_PUBLISHED, 0)) == UCM_PENDING) {
    }
    CHECK(code == UCM_OK);
    CHECK(s->wait(s->store, task, UCM_PUBLISHED, UCM_OWN_DEADLINE) == UCM_OK); /* again */
    CHECK(s->check(s->store, task, UCM_PUBLISHED, &finished) == UCM_OK && finished == 1);
    CHECK(s->failures(s->store, task, NULL, NULL, 0, &count) == UCM_OK && count == 0);
    CHECK(s->release(s->store, task) == UCM_OK);
    CHECK(s->release(s->store, task) == UCM_INVALID_INPUT);

    CHECK(s->lookup(s->store, ids, BLOCKS, found) == UCM_OK);
    for (int block = 0; block < BLOCKS; block++) {
        CHECK(found[block] == 1);
    }
    CHECK(s->lookup_on_prefix(s->store, ids, BLOCKS, &present) == UCM_OK && present == BLOCKS);

    make_rows(s, ids, target, row_ids, shards, addrs);
    CHECK(s->load(s->store, row_ids, shards, addrs, rows, s->pieces_per_shard, UCM_OWN_DEADLINE, &task) == UCM_OK);
    CHECK(s->wait(s->store, task, UCM_PUBLISHED, UCM_OWN_DEADLINE) == UCM_OK);
    CHECK(memcmp(copy, target, bytes) == 0);
    CHECK(s->release(s->store, task) == UCM_OK);

    /* One block of two is not there: its rows fail, with their code, and the others' do not matter. */
    memset(row_ids, 0xee, UCM_ID_SIZE * s->shards_per_block);
    CHECK(s->load(s->store, row_ids, shards, addrs, rows, s->pieces_per_shard, UCM_OWN_DEADLINE, &other) == UCM_OK);
    CHECK(other != task);
    CHECK(s->wait(s->store, other, UCM_PUBLISHED, UCM_OWN_DEADLINE) == UCM_NOT_FOUND);
    CHECK(s->last_error(text, sizeof text) > 0 && strstr(text, "row=0") != NULL);
    CHECK(s->failures(s->store, other, bad_rows, codes, 2, &count) == UCM_OK);
    CHECK(count >= s->shards_per_block && bad_rows[0] == 0 && codes[0] == UCM_NOT_FOUND);
    CHECK(s->check(s->store, other, UCM_PUBLISHED, &finished) == UCM_OK && finished == 1);
    CHECK(s->release(s->store, other) == UCM_OK);

    free(source), free(target), free(row_ids), free(shards), free(addrs), free(copy);
    return 0;
}

/* Everything a caller can get wrong is an error code and a sentence, and nothing is written. */
int table_errors(const struct ucm_store *s)
{
    uint8_t ids[UCM_ID_SIZE] = {1}, found = 9, finished = 9;
    uint32_t shard = 0, bad_shard = s->shards_per_block;
    size_t present = 9, count = 9, length = 9;
    uint64_t task = 9, addrs[64], null_addrs[64] = {0};
    char text[512], tiny[8];
    struct ucm_store fake = *s;
    uint64_t not_a_slot[4] = {0};
    CHECK(s->pieces_per_shard <= 64);
    for (int at = 0; at < 64; at++) {
        addrs[at] = (uint64_t)(uintptr_t)addrs;
    }

    CHECK(s->lookup(NULL, ids, 1, &found) == UCM_INVALID_INPUT);
    CHECK(s->last_error(text, sizeof text) > 0 && strstr(text, "not the one of a table") != NULL);
    fake.store = not_a_slot;
    CHECK(s->lookup(fake.store, ids, 1, &found) == UCM_INVALID_INPUT);
    CHECK(s->lookup(s->store, NULL, 1, &found) == UCM_INVALID_INPUT);
    CHECK(s->last_error(text, sizeof text) > 0 && strstr(text, "argument=ids") != NULL);
    CHECK(s->lookup(s->store, ids, 1, NULL) == UCM_INVALID_INPUT);
    CHECK(s->lookup(s->store, ids, SIZE_MAX, &found) == UCM_INVALID_INPUT);
    CHECK(s->lookup(s->store, NULL, 0, NULL) == UCM_OK);
    CHECK(s->lookup_on_prefix(s->store, ids, 1, NULL) == UCM_INVALID_INPUT);
    CHECK(s->lookup_on_prefix(s->store, NULL, 1, &present) == UCM_INVALID_INPUT);

    uint32_t n = s->pieces_per_shard;
    CHECK(s->load(s->store, ids, &shard, addrs, 1, n + 1, 0, &task) == UCM_INVALID_INPUT);
    CHECK(s->last_error(text, sizeof text) > 0 && strstr(text, "expected=") != NULL);
    CHECK(s->load(s->store, ids, NULL, addrs, 1, n, 0, &task) == UCM_INVALID_INPUT);
    CHECK(s->load(s->store, ids, &shard, NULL, 1, n, 0, &task) == UCM_INVALID_INPUT);
    CHECK(s->load(s->store, ids, &shard, addrs, 1, n, 0, NULL) == UCM_INVALID_INPUT);
    CHECK(s->load(s->store, ids, &bad_shard, addrs, 1, n, 0, &task) == UCM_INVALID_INPUT);
    CHECK(s->load(s->store, ids, &shard, null_addrs, 1, n, 0, &task) == UCM_INVALID_INPUT);
    CHECK(s->load(s->store, ids, &shard, (const uint64_t *)((const char *)addrs + 1), 1, n, 0, &task) ==
          UCM_INVALID_INPUT);
    CHECK(s->load(s->store, ids, &shard, addrs, SIZE_MAX, n, 0, &task) == UCM_INVALID_INPUT);
    CHECK(s->dump(s->store, ids, &shard, addrs, 1, n + 1, &task) == UCM_INVALID_INPUT);
    CHECK(s->dump(s->store, ids, &bad_shard, addrs, 1, n, &task) == UCM_INVALID_INPUT);
    CHECK(s->dump(s->store, NULL, &shard, addrs, 1, n, &task) == UCM_INVALID_INPUT);

    CHECK(s->check(s->store, 123456, UCM_PUBLISHED, &finished) == UCM_INVALID_INPUT);
    CHECK(s->wait(s->store, 0, UCM_PUBLISHED, 0) == UCM_INVALID_INPUT);
    CHECK(s->failures(s->store, 0, NULL, NULL, 0, &count) == UCM_INVALID_INPUT);
    CHECK(s->release(s->store, 0) == UCM_INVALID_INPUT);
    CHECK(s->stats(s->store, text, sizeof text, NULL) == UCM_INVALID_INPUT);
    CHECK(found == 9 && finished == 9 && present == 9 && count == 9 && task == 9);

    /* A task without rows is over at once; what is asked of it can be wrong too. */
    CHECK(s->load(s->store, NULL, NULL, NULL, 0, 0, 0, &task) == UCM_OK && task != 9);
    CHECK(s->wait(s->store, task, 2, 0) == UCM_INVALID_INPUT);
    CHECK(s->check(s->store, task, UCM_PUBLISHED, NULL) == UCM_INVALID_INPUT);
    CHECK(s->failures(s->store, task, NULL, NULL, 1, &count) == UCM_INVALID_INPUT);
    CHECK(s->failures(s->store, task, NULL, NULL, 0, NULL) == UCM_INVALID_INPUT);
    CHECK(s->wait(s->store, task, UCM_STAGED, 0) == UCM_OK);
    CHECK(s->release(s->store, task) == UCM_OK);

    /* Texts are cut to the room there is, with a zero behind them, and their whole length is told. */
    CHECK(s->lookup(NULL, ids, 1, &found) == UCM_INVALID_INPUT);
    memset(tiny, 'x', sizeof tiny);
    length = s->last_error(tiny, sizeof tiny);
    CHECK(length > sizeof tiny && strlen(tiny) == sizeof tiny - 1);
    CHECK(s->last_error(NULL, 0) == length);
    CHECK(s->stats(s->store, NULL, 0, &length) == UCM_OK && length > 2);
    CHECK(s->stats(s->store, tiny, sizeof tiny, &length) == UCM_OK && length > sizeof tiny && tiny[0] == '{');
    return 0;
}

/* Dumps first shards alone, of ever more blocks: each keeps a slot, until there is none. The code of the last. */
int table_until_busy(const struct ucm_store *s)
{
    uint8_t id[UCM_ID_SIZE] = {0};
    uint32_t shard = 0;
    uint64_t task, addrs[64];
    uint8_t *source = calloc(1, (size_t)s->shard_size);
    int32_t code = UCM_OK;
    for (int at = 0; at < 64; at++) {
        addrs[at] = (uint64_t)(uintptr_t)source;
    }
    for (uint32_t number = 1; number < 100000 && code == UCM_OK; number++) {
        memcpy(id, &number, sizeof number);
        code = s->dump(s->store, id, &shard, addrs, 1, s->pieces_per_shard, &task);
        if (code == UCM_OK) {
            code = s->wait(s->store, task, UCM_STAGED, UCM_OWN_DEADLINE);
            s->release(s->store, task);
        }
    }
    free(source);
    return code;
}

/* Every function returns this code. */
int table_all_return(const struct ucm_store *s, int32_t code)
{
    uint8_t ids[UCM_ID_SIZE] = {1}, found, finished;
    uint32_t shard = 0;
    size_t number;
    uint64_t task, addrs[64] = {1};
    char text[128];
    CHECK(s->lookup(s->store, ids, 1, &found) == code);
    CHECK(s->last_error(text, sizeof text) > 0);
    CHECK(s->lookup_on_prefix(s->store, ids, 1, &number) == code);
    CHECK(s->load(s->store, ids, &shard, addrs, 1, s->pieces_per_shard, 0, &task) == code);
    CHECK(s->dump(s->store, ids, &shard, addrs, 1, s->pieces_per_shard, &task) == code);
    CHECK(s->check(s->store, 1, UCM_PUBLISHED, &finished) == code);
    CHECK(s->wait(s->store, 1, UCM_PUBLISHED, UCM_OWN_DEADLINE) == code);
    CHECK(s->failures(s->store, 1, NULL, NULL, 0, &number) == code);
    CHECK(s->release(s->store, 1) == code);
    CHECK(s->stats(s->store, text, sizeof text, &number) == code);
    return 0;
}

/* Asks until the store is closed, which another thread does. */
int table_until_closed(const struct ucm_store *s)
{
    uint8_t ids[UCM_ID_SIZE] = {1}, found;
    int32_t code;
    while ((code = s->lookup(s->store, ids, 1, &found)) == UCM_OK) {
    }
    return code;
}
