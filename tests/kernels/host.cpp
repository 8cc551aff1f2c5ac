// The kernels of kernels/copy.cu on the host: the CUDA words that they use, and a program that runs them, every thread
// in turn, on random descriptors against memcpy. Built with the address and undefined-behaviour sanitizers by
// test_ptx.py, so that a wrong address or a misaligned word ends the program. Takes a seed; says nothing when all is well.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Index {
    unsigned x, y;
};
static Index threadIdx, blockIdx, gridDim;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <typename Word>
Word __ldcs(const Word* from) {
    return *from;
}
template <typename Word>
void __stcs(Word* to, Word word) {
    *to = word;
}

#include "../../kernels/copy.cu"

namespace {

using Bytes = std::vector<unsigned char>;

std::mt19937_64 generator;

u64 below(u64 end) { return std::uniform_int_distribution<u64>(0, end - 1)(generator); }

Bytes noise(u64 len) {
    Bytes bytes(len);
    for (auto& byte : bytes) {
        byte = static_cast<unsigned char>(generator());
    }
    return bytes;
}

// memcpy, which may not be asked for nothing: an empty vector is nowhere.
void plain(unsigned char* to, const unsigned char* from, u64 len) {
    if (len > 0) {
        std::memcpy(to, from, len);
    }
}

u64 address(const void* of) { return reinterpret_cast<u64>(of); }

// A multiple of 1, 2, 4, 8 or 16, so that two of them often allow wide words.
u64 shift() { return (below(16) >> below(5)) << below(5); }

u64 length() {
    switch (below(4)) {
        case 0:
            return below(20);
        case 1:
            return 16 * below(2 * TILE);
        case 2:
            return below(4000);
        default:
            return below(100000);
    }
}

// Memory of its own, `shift` bytes behind an aligned address, after whose last byte nothing may be touched.
struct Place {
    u64 shift, len;
    Bytes bytes;

    explicit Place(u64 len) : shift(::shift()), len(len), bytes(noise(shift + len)) {}
    unsigned char* start() { return bytes.data() + shift; }
};

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, Arguments... arguments) {
    gridDim = {static_cast<unsigned>(1 + below(5)), static_cast<unsigned>(1 + below(4))};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
            for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {
                kernel(arguments...);
            }
        }
    }
}

void expect(bool right, const char* what) {
    if (!right) {
        std::fprintf(stderr, "%s: wrong bytes\n", what);
        std::exit(1);
    }
}

void batch(u64 count) {
    std::vector<Place> from, to;
    std::vector<Pair> pairs;
    for (u64 i = 0; i < count; ++i) {
        const u64 len = length();
        from.emplace_back(len);
        to.emplace_back(len);
    }
    std::vector<Bytes> expected;
    for (u64 i = 0; i < count; ++i) {
        pairs.push_back({address(from[i].start()), address(to[i].start()), from[i].len});
        expected.push_back(to[i].bytes);
        plain(expected[i].data() + to[i].shift, from[i].start(), from[i].len);
    }
    launch(ucm_batch, pairs.data(), count);
    for (u64 i = 0; i < count; ++i) {
        expect(to[i].bytes == expected[i], "ucm_batch");
    }
}

void pieces(u64 count, bool gather) {
    std::vector<Place> places;
    std::vector<u64> ats;
    u64 end = 0;
    for (u64 i = 0; i < count; ++i) {
        places.emplace_back(length());
        ats.push_back(end += shift());
        end += places[i].len;
    }
    Bytes record = noise(end);
    Bytes expected = record;
    std::vector<Bytes> scattered;
    std::vector<Piece> described;
    for (u64 i = 0; i < count; ++i) {
        Place& place = places[i];
        described.push_back({address(place.start()), ats[i], place.len});
        scattered.push_back(place.bytes);
        if (gather) {
            plain(expected.data() + ats[i], place.start(), place.len);
        } else {
            plain(scattered[i].data() + place.shift, record.data() + ats[i], place.len);
        }
    }
    const char* name = gather ? "ucm_gather" : "ucm_scatter";
    launch(gather ? ucm_gather : ucm_scatter, described.data(), count, address(record.data()));
    expect(record == expected, name);
    for (u64 i = 0; i < count; ++i) {
        expect(places[i].bytes == scattered[i], name);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "give a seed\n");
        return 2;
    }
    generator.seed(std::strtoull(argv[1], nullptr, 10));
    for (int i = 0; i < 30; ++i) {
        const u64 count = below(12);
        batch(count);
        pieces(count, true);
        pieces(count, false);
    }
    return 0;
}
