// Copies many pieces of memory in one launch. Three entry points differ in what describes a piece; one function copies.
//
//   ucm_batch    pairs of addresses
//   ucm_gather   pieces at their places behind one base address
//   ucm_scatter  the reverse
//
// Launch with blocks of exactly THREADS threads and any grid of two dimensions: blocks share out the descriptors along
// x, and the tiles of one descriptor along y. The result is the same for every grid. Descriptors may have any length,
// 0 too; nothing that one of them writes may be read or written by another.
//
// `python tools/ptx.py` makes copy.ptx from this file. It also compiles as C++ for the host (tests/kernels/host.cpp).

typedef unsigned long long u64;

// `len` bytes at the address `src` go to the address `dst`.
struct Pair {
    u64 src;
    u64 dst;
    u64 len;
};

// `len` bytes at the address `addr` belong `at` bytes behind the base.
struct Piece {
    u64 addr;
    u64 at;
    u64 len;
};

enum : u64 {
    THREADS = 256,
    // Words that a thread loads before it stores the first: what hides the latency of memory.
    IN_FLIGHT = 4,
    // Words that a block moves at a step.
    TILE = THREADS * IN_FLIGHT,
};

// Copies in words of one width, to which both addresses are aligned. Returns how many bytes filled words.
template <typename Word>
__device__ __forceinline__ u64 copy_words(u64 from, u64 to, u64 len) {
    const Word* src = reinterpret_cast<const Word*>(from);
    Word* dst = reinterpret_cast<Word*>(to);
    const u64 words = len / sizeof(Word);
    for (u64 first = blockIdx.y * TILE + threadIdx.x; first < words; first += gridDim.y * TILE) {
        Word held[IN_FLIGHT];
#pragma unroll
        for (u64 i = 0; i < IN_FLIGHT; ++i) {
            if (first + i * THREADS < words) {
                held[i] = __ldcs(src + first + i * THREADS);
            }
        }
#pragma unroll
        for (u64 i = 0; i < IN_FLIGHT; ++i) {
            if (first + i * THREADS < words) {
                __stcs(dst + first + i * THREADS, held[i]);
            }
        }
    }
    return words * sizeof(Word);
}

// Copies one piece, in the widest words that its own two addresses allow, and the bytes that fill no word one by one.
__device__ __forceinline__ void copy(u64 from, u64 to, u64 len) {
    const u64 either = from | to;
    u64 done;
    if (either % sizeof(uint4) == 0) {
        done = copy_words<uint4>(from, to, len);
    } else if (either % sizeof(uint2) == 0) {
        done = copy_words<uint2>(from, to, len);
    } else if (either % sizeof(unsigned) == 0) {
        done = copy_words<unsigned>(from, to, len);
    } else {
        done = copy_words<unsigned char>(from, to, len);
    }
    const u64 at = done + threadIdx.x;
    if (blockIdx.y == 0 && at < len) {
        __stcs(reinterpret_cast<unsigned char*>(to + at), __ldcs(reinterpret_cast<const unsigned char*>(from + at)));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) ucm_batch(const Pair* pairs, u64 count) {
    for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
        copy(pairs[i].src, pairs[i].dst, pairs[i].len);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) ucm_gather(const Piece* pieces, u64 count, u64 base) {
    for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
        copy(pieces[i].addr, base + pieces[i].at, pieces[i].len);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) ucm_scatter(const Piece* pieces, u64 count, u64 base) {
    for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
        copy(base + pieces[i].at, pieces[i].addr, pieces[i].len);
    }
}
