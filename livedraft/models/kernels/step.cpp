// One pass of a Llama-like decoder in bf16 on a CPU: all layers in one parallel region.
//
// Why beside torch: a pass of a small model is some three hundred small operations there, and each evicts the next one's code and
// data from the caches. Here it is one call that streams every weight once. `Decoder` in decoder.py is the slow twin.
//
// A row's numbers do not depend on how many rows are in the pass, nor on the number of threads: every output is summed by one thread,
// over the inputs in order. So verification of k drafted tokens gives bit for bit what plain decoding gives.
//
// Weights are bf16, in super-blocks of four vectors of outputs, kSuper = 4 W: [outputs / kSuper][inputs / 2][kSuper][2], so that a
// thread reads them from front to back. Or they are int8 with one scale an output, and activations are rounded to 8 bits too, see
// `RoundedInputs`. Or they stay as a GGUF file stores them, in blocks of 32 inputs with a scale (and an offset) each, see `Block`.
// Activations are float32; where the CPU multiplies pairs of bf16 itself (AVX512-BF16) they are rounded to bf16 as they enter a
// product, elsewhere (AVX512, AVX2) weights are widened in registers, which is a shift. Where it multiplies tiles of them (AMX)
// sixteen rows cost what one does.
//
// Legend: W floats of a vector register (vectors.hpp), N rows of this pass, D width, F feed-forward width, H query heads, G key-value heads,
// E head width, T cache positions.

#include <omp.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.hpp"

extern "C" {

struct Matrix {
    const void* blocks;
    const float* scales;  // [outputs padded to kSuper]: the blocks are int8; null: they are bf16, or as `block_bits` says
    const float* bias;    // [outputs padded to kSuper], or null
    int num_outputs;
    int num_inputs;
    int block_bits;       // 4 or 8: a GGUF file's blocks; 0: none of them
};

struct Layer {
    const float* attention_norm;
    const float* feed_forward_norm;
    const float* query_norm;  // or null
    const float* key_norm;
    Matrix query_key_value;   // outputs (H + 2G) * E
    Matrix attention_output;
    Matrix gate_up;           // in each super-block 32 gates, then their 32 ups
    Matrix down;
    bf16* keys;               // [slots, G, T, E]
    bf16* values;
};

struct Model {
    int width, feed_forward_width, num_heads, num_kv_heads, head_width, num_layers, max_length;
    float norm_eps;
    const bf16* embedding;    // [V, D]
    const Layer* layers;
    const float* final_norm;
    Matrix head;
    const float* cos;         // [T, E / 2]
    const float* sin;
};

}  // extern "C"

namespace {

constexpr int kMaxTile = W == 16 ? 6 : 3;  // rows multiplied with a block at a time: 6 x 4 vectors of sums fit 32 registers, 3 x 4 fit 16
constexpr int kSuper = 4 * W;
constexpr int kPrefetch = 1024;  // bytes ahead

// --- products --------------------------------------------------------------------------------------------------------
// `Input` is what activations are stored as, and `multiply_add` one pair of inputs into sums of W outputs.

#ifdef __AVX512BF16__
using Input = bf16;
using WeightPairs = __m512bh;
using InputPair = __m512bh;

inline WeightPairs load_weights(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline InputPair load_pair(const Input* at) { return (__m512bh)_mm512_set1_epi32(load_as<int>(at)); }

inline floats multiply_add(WeightPairs weights, InputPair inputs, floats sum) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, weights, inputs);
}
#else
using Input = float;
using WeightPairs = Pairs;
using InputPair = Pairs;

inline WeightPairs load_weights(const bf16* at) { return widen_pairs(at); }
inline InputPair load_pair(const Input* at) { return {all(at[0]), all(at[1])}; }

inline floats multiply_add(const WeightPairs& weights, const InputPair& inputs, floats sum) {
    return fused(weights.odd, inputs.odd, fused(weights.even, inputs.even, sum));
}
#endif

// Sums of ROWS rows with VECTORS x W neighbouring outputs of one super-block, inputs in order. Not inlined: compiling it once for each
// use took most of a first start.
template <int ROWS, int VECTORS>
[[gnu::noinline]] void multiply(const bf16* block, const Input* x, int stride, int num_inputs, floats (*sums)[VECTORS]) {
    floats own[ROWS][VECTORS] = {};
    for (int pair = 0; pair < num_inputs / 2; ++pair, block += 2 * kSuper) {
        WeightPairs w[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            _mm_prefetch((const char*)(block + 2 * W * v) + kPrefetch, _MM_HINT_T0);
            w[v] = load_weights(block + 2 * W * v);
        }
        for (int m = 0; m < ROWS; ++m) {
            const InputPair in = load_pair(x + (size_t)m * stride + 2 * pair);
            for (int v = 0; v < VECTORS; ++v) own[m][v] = multiply_add(w[v], in, own[m][v]);
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int v = 0; v < VECTORS; ++v) sums[m][v] = own[m][v];
}

// AMX multiplies a tile of 16 rows x 32 inputs with one of 32 inputs x 16 outputs. A super-block's pairs of inputs lie as it wants
// them, 2 * kSuper numbers apart. Its sums are not those of `multiply`, even and odd inputs of 32 come together last; so one row is a
// tile too, whose other rows nobody reads, and a row's numbers are the same in every pass.
#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__) && !defined(LIVEDRAFT_NO_TILES)
#define LIVEDRAFT_TILES
constexpr int kTileOfRows = 16;
constexpr int kTilePrefetch = 2048;  // numbers ahead: the next 32 inputs of a super-block

// Of this thread; while it lasts tiles may be used.
struct Tiles {
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    Tiles() {
        const Config config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

template <int VECTORS>
[[gnu::noinline]] void multiply_tiles(const bf16* block, const bf16* x, int stride, int num_inputs, bool is_first, float* sums) {
    const long between = 2 * kSuper * sizeof(bf16), between_rows = (long)stride * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < num_inputs; i += 32, block += 32 * kSuper, x += 32) {
        if (is_first)  // later rows find the weights in the second-level cache
            for (int pair = 0; pair < 16; ++pair)
                for (int v = 0; v < VECTORS; ++v)
                    _mm_prefetch((const char*)(block + 2 * kSuper * pair + 2 * W * v + kTilePrefetch), _MM_HINT_T0);
        _tile_loadd(4, x, between_rows);
        _tile_loadd(5, block, between);
        _tile_dpbf16ps(0, 4, 5);
        if (VECTORS > 1) {
            _tile_loadd(6, block + 2 * W, between);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (VECTORS > 2) {
            _tile_loadd(7, block + 4 * W, between);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (VECTORS > 3) {
            _tile_loadd(5, block + 6 * W, between);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, sums, VECTORS * W * sizeof(float));
    if (VECTORS > 1) _tile_stored(1, sums + W, VECTORS * W * sizeof(float));
    if (VECTORS > 2) _tile_stored(2, sums + 2 * W, VECTORS * W * sizeof(float));
    if (VECTORS > 3) _tile_stored(3, sums + 3 * W, VECTORS * W * sizeof(float));
}
#else
constexpr int kTileOfRows = 1;
struct Tiles {};
#endif

// Rows that a buffer of inputs must have: whole tiles are read.
inline size_t padded_rows(int num_rows) { return (size_t)(num_rows + kTileOfRows - 1) / kTileOfRows * kTileOfRows; }

// Of the rows that are left; the last two tiles are alike.
inline int tile_of(int left, int most) { return left > most && left < 2 * most ? (left + 1) / 2 : std::min(left, most); }

// write(row, first output, vectors of sums) for all rows; VECTORS of them.
template <int VECTORS, class Write>
void multiply_rows(const Matrix& matrix, int first_output, const Input* x, int stride, int num_rows, const Write& write) {
    const bf16* block = (const bf16*)matrix.blocks + (size_t)(first_output / kSuper) * matrix.num_inputs * kSuper +
                        2 * (first_output % kSuper);
#ifdef LIVEDRAFT_TILES
    if (matrix.num_inputs % 32 == 0) {
        alignas(64) floats sums[kTileOfRows][VECTORS];
        for (int row = 0; row < num_rows; row += kTileOfRows) {
            multiply_tiles<VECTORS>(block, x + (size_t)row * stride, stride, matrix.num_inputs, row == 0, (float*)sums);
            for (int m = 0; m < std::min(kTileOfRows, num_rows - row); ++m) write(row + m, first_output, sums[m]);
        }
        return;
    }
#endif
    for (int row = 0; row < num_rows;) {
        const int rows = tile_of(num_rows - row, kMaxTile);
        floats sums[kMaxTile][VECTORS];
        const Input* from = x + (size_t)row * stride;
        switch (rows) {
            case 1: multiply<1, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 2: multiply<2, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 3: multiply<3, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 4: multiply<std::min(4, kMaxTile), VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 5: multiply<std::min(5, kMaxTile), VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            default: multiply<kMaxTile, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
        }
        for (int m = 0; m < rows; ++m) write(row + m, first_output, sums[m]);
        row += rows;
    }
}

inline floats load_input(const float* at) { return load(at); }
inline floats load_input(const bf16* at) { return widen(at); }

// int8 weights lie as [outputs / kSuper][inputs / 4][kSuper][4], inputs padded to whole blocks of 32, with 128 added: the instruction that
// multiplies four neighbouring bytes at once wants one side without a sign. So 128 times the sum of the inputs is taken off again.
// Products and their sums over a block are whole numbers, exact on every CPU.
constexpr int kRounded = 32;  // neighbouring inputs that share a scale
constexpr int kRoundedTile = W == 16 ? 6 : 2;  // rows whose sums within a block fit the registers

inline int num_rounded_blocks(int num_inputs) { return (num_inputs + kRounded - 1) / kRounded; }

// A pass's inputs as int8 weights want them, made by each thread for itself: of each 32 the largest is 127 levels.
struct RoundedInputs {
    std::vector<int8_t> levels;  // [N][blocks][32]
    std::vector<float> scales;   // [N][blocks]
    std::vector<int> offsets;    // [N][blocks]: -128 times the sum of the levels
    void fill(const Input* x, int stride, int num_rows, int num_inputs) {
        const size_t num_blocks = num_rounded_blocks(num_inputs), count = num_rows * num_blocks;
        if (scales.size() < count) {
            levels.resize(count * kRounded);
            scales.resize(count);
            offsets.resize(count);
        }
        for (int m = 0; m < num_rows; ++m)
            for (size_t b = 0; b < num_blocks; ++b)
                round_block(x + (size_t)m * stride + b * kRounded, num_inputs - (int)b * kRounded, m * num_blocks + b);
    }
    // `count` inputs are left, a multiple of W; where they are fewer than 32, the block ends in zeros.
    void round_block(const Input* x, int count, size_t block) {
        floats values[kRounded / W];
        ints largest = {};
        for (int i = 0; i < kRounded / W; ++i) {
            values[i] = i * W < count ? load_input(x + i * W) : floats{};
            const ints size = (ints)values[i] & 0x7fffffff;  // as whole numbers they are in order, and a NaN is above all
            largest = size > largest ? size : largest;
        }
        float most;
        const int bits = largest_of(largest);
        std::memcpy(&most, &bits, sizeof most);
        const floats shift = all(12582912.0f), inverse = all(most > 0 ? 127.0f / most : 0.0f);  // adding 1.5 * 2^23 rounds
        floats total = {};
        for (int i = 0; i < kRounded / W; ++i) {
            const floats level = fused(values[i], inverse, shift) - shift;
            total += level;
            store_bytes(__builtin_convertvector(level, ints), levels.data() + block * kRounded + i * W);
        }
        scales[block] = most / 127.0f;  // a NaN stays one: the engine must see it
        offsets[block] = -128 * (int)sum_of(total);
    }
};

thread_local RoundedInputs rounded_inputs;

// As `multiply`; `first_row` of the rounded inputs.
template <int ROWS, int VECTORS>
[[gnu::noinline]] void multiply_rounded(const uint8_t* block, int first_row, int num_blocks, floats (*sums)[VECTORS]) {
    for (int m = 0; m < ROWS; ++m)
        for (int v = 0; v < VECTORS; ++v) sums[m][v] = floats{};
    const size_t first = (size_t)first_row * num_blocks;
    const int8_t* x = rounded_inputs.levels.data() + first * kRounded;
    const float* scales = rounded_inputs.scales.data() + first;
    const int* offsets = rounded_inputs.offsets.data() + first;
    for (int b = 0; b < num_blocks; ++b) {
        ints inner[ROWS][VECTORS];
        for (int m = 0; m < ROWS; ++m)
            for (int v = 0; v < VECTORS; ++v) inner[m][v] = ints{} + offsets[(size_t)m * num_blocks + b];
#pragma GCC unroll 8
        for (int i = 0; i < kRounded; i += 4, block += 4 * kSuper) {
            ints w[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                _mm_prefetch((const char*)(block + 4 * W * v) + kPrefetch, _MM_HINT_T0);
                w[v] = load_as<ints>(block + 4 * W * v);
            }
            for (int m = 0; m < ROWS; ++m) {
                const FourBytes in(x + ((size_t)m * num_blocks + b) * kRounded + i);
                for (int v = 0; v < VECTORS; ++v) inner[m][v] = in.times(w[v], inner[m][v]);
            }
        }
        for (int m = 0; m < ROWS; ++m) {
            const floats scale = all(scales[(size_t)m * num_blocks + b]);
            for (int v = 0; v < VECTORS; ++v)
                sums[m][v] = fused(__builtin_convertvector(inner[m][v], floats), scale, sums[m][v]);
        }
    }
}

template <int VECTORS, class Write>
void multiply_rounded_rows(const Matrix& matrix, int first_output, int num_rows, const Write& write) {
    const int num_blocks = num_rounded_blocks(matrix.num_inputs);
    const uint8_t* block = (const uint8_t*)matrix.blocks + (size_t)(first_output / kSuper) * num_blocks * kRounded * kSuper +
                           4 * (first_output % kSuper);
    for (int row = 0; row < num_rows;) {
        const int rows = tile_of(num_rows - row, kRoundedTile);
        floats sums[kRoundedTile][VECTORS];
        switch (rows) {
            case 1: multiply_rounded<1, VECTORS>(block, row, num_blocks, sums); break;
            case 2: multiply_rounded<2, VECTORS>(block, row, num_blocks, sums); break;
            case 3: multiply_rounded<std::min(3, kRoundedTile), VECTORS>(block, row, num_blocks, sums); break;
            case 4: multiply_rounded<std::min(4, kRoundedTile), VECTORS>(block, row, num_blocks, sums); break;
            case 5: multiply_rounded<std::min(5, kRoundedTile), VECTORS>(block, row, num_blocks, sums); break;
            default: multiply_rounded<kRoundedTile, VECTORS>(block, row, num_blocks, sums); break;
        }
        for (int m = 0; m < rows; ++m) write(row + m, first_output, sums[m]);
        row += rows;
    }
}

// A GGUF file's block of 32 inputs, for a super-block of outputs: value = scale * level + offset. [scale of each output][offset of each,
// where levels have 4 bits] as float16, then [word][output], a word holding 32 / BITS neighbouring inputs of an output, the first lowest.
template <int BITS>
struct Block {
    static constexpr int kInputs = 32, kPerWord = 32 / BITS, kHeader = kSuper * (BITS == 4 ? 2 : 1);
    static constexpr size_t kBytes = kSuper * 4 * BITS + 2 * kHeader;
};

#ifdef __AVX512F__
constexpr int kBlockTile = 4;
inline floats load_float16(const uint16_t* at) { return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
#else
constexpr int kBlockTile = 2;
inline floats load_float16(const uint16_t* at) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
#endif

template <int BITS>
inline floats levels_of(ints words, int i) {
    if (BITS == 8) return __builtin_convertvector((words << (24 - 8 * i)) >> 24, floats);
#ifdef __AVX512F__
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), table);  // looks at the lowest four bits
#else
    return __builtin_convertvector((words >> (4 * i)) & 15, floats);
#endif
}

// As `multiply` over blocks; `totals` are the sums of each 32 inputs of a row.
template <int BITS, int ROWS, int VECTORS>
[[gnu::noinline]] void multiply_blocks(const char* block, int within, const float* x, const float* totals, int num_inputs,
                            floats (*sums)[VECTORS]) {
    using B = Block<BITS>;
    floats own[ROWS][VECTORS] = {};
    const int num_blocks = num_inputs / B::kInputs;
    for (int b = 0; b < num_blocks; ++b, block += B::kBytes) {
        floats inner[ROWS][VECTORS] = {};
        for (int word = 0; word < BITS; ++word) {
            ints words[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                const char* at = block + 2 * B::kHeader + 4 * (word * kSuper + within + W * v);
                _mm_prefetch(at + kPrefetch, _MM_HINT_T0);
                words[v] = load_as<ints>(at);
            }
#pragma GCC unroll 8
            for (int i = 0; i < B::kPerWord; ++i) {
                floats levels[VECTORS];
                for (int v = 0; v < VECTORS; ++v) levels[v] = levels_of<BITS>(words[v], i);
                for (int m = 0; m < ROWS; ++m) {
                    const floats in = all(x[(size_t)m * num_inputs + b * B::kInputs + word * B::kPerWord + i]);
                    for (int v = 0; v < VECTORS; ++v) inner[m][v] = fused(levels[v], in, inner[m][v]);
                }
            }
        }
        const uint16_t* scales = (const uint16_t*)block + within;
        for (int v = 0; v < VECTORS; ++v) {
            const floats scale = load_float16(scales + W * v);
            for (int m = 0; m < ROWS; ++m) own[m][v] = fused(scale, inner[m][v], own[m][v]);
            if (BITS == 4) {
                const floats offset = load_float16(scales + kSuper + W * v);
                for (int m = 0; m < ROWS; ++m) own[m][v] = fused(offset, all(totals[(size_t)m * num_blocks + b]), own[m][v]);
            }
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int v = 0; v < VECTORS; ++v) sums[m][v] = own[m][v];
}

// A pass's inputs as blocks want them, made by each thread for itself: float32, row after row, and the sums of each 32.
struct BlockInputs {
    std::vector<float> rows, totals;
    void fill(const Input* x, int stride, int num_rows, int num_inputs) {
        if (rows.size() < (size_t)num_rows * num_inputs) rows.resize((size_t)num_rows * num_inputs);
        if (totals.size() < (size_t)num_rows * num_inputs / 32) totals.resize((size_t)num_rows * num_inputs / 32);
        for (int m = 0; m < num_rows; ++m)
            for (int b = 0; b < num_inputs / 32; ++b) {
                floats total = {};
                for (int i = 32 * b; i < 32 * (b + 1); i += W) {
                    const floats some = load_input(x + (size_t)m * stride + i);
                    store(rows.data() + (size_t)m * num_inputs + i, some);
                    total += some;
                }
                totals[(size_t)m * (num_inputs / 32) + b] = sum_of(total);
            }
    }
};

thread_local BlockInputs block_inputs;

template <int VECTORS, int BITS, class Write>
void multiply_block_rows(const Matrix& matrix, int first_output, int num_rows, const Write& write) {
    const int I = matrix.num_inputs;
    const size_t super_bytes = (size_t)(I / 32) * Block<BITS>::kBytes;
    const int within = first_output % kSuper;  // words and scales of later outputs lie this much further on
    const char* block = (const char*)matrix.blocks + (size_t)(first_output / kSuper) * super_bytes;
    for (int row = 0; row < num_rows;) {
        const int rows = std::min(num_rows - row, kBlockTile);
        floats sums[kBlockTile][VECTORS];
        const float* x = block_inputs.rows.data() + (size_t)row * I;
        const float* totals = block_inputs.totals.data() + (size_t)row * (I / 32);
        switch (rows) {
            case 1: multiply_blocks<BITS, 1, VECTORS>(block, within, x, totals, I, sums); break;
            case 2: multiply_blocks<BITS, 2, VECTORS>(block, within, x, totals, I, sums); break;
            case 3: multiply_blocks<BITS, std::min(3, kBlockTile), VECTORS>(block, within, x, totals, I, sums); break;
            default: multiply_blocks<BITS, kBlockTile, VECTORS>(block, within, x, totals, I, sums); break;
        }
        for (int m = 0; m < rows; ++m) write(row + m, first_output, sums[m]);
        row += rows;
    }
}

// This thread's share of some units: vectors of outputs, super-blocks, heads or rows.
struct Share {
    int begin, end;
    Share(int num_units, int thread, int num_threads)
        : begin((int)((long long)num_units * thread / num_threads)),
          end((int)((long long)num_units * (thread + 1) / num_threads)) {}
};

// Inputs as the weights' kind wants them, if not as they are.
inline void prepare_inputs(const Matrix& matrix, const Input* x, int stride, int num_rows) {
    if (matrix.block_bits)
        block_inputs.fill(x, stride, num_rows, matrix.num_inputs);
    else if (matrix.scales)
        rounded_inputs.fill(x, stride, num_rows, matrix.num_inputs);
}

// write(row, first output, vectors of sums), by the kind of the weights. Inputs must be prepared.
template <int VECTORS, class Write>
void multiply_any(const Matrix& matrix, int first_output, const Input* x, int stride, int num_rows, const Write& write) {
    if (matrix.block_bits == 4)
        multiply_block_rows<VECTORS, 4>(matrix, first_output, num_rows, write);
    else if (matrix.block_bits == 8)
        multiply_block_rows<VECTORS, 8>(matrix, first_output, num_rows, write);
    else if (matrix.scales)
        multiply_rounded_rows<VECTORS>(matrix, first_output, num_rows, write);
    else
        multiply_rows<VECTORS>(matrix, first_output, x, stride, num_rows, write);
}

template <class Write>
void linear(const Matrix& matrix, const Input* x, int stride, int num_rows, int thread, int num_threads, const Write& write) {
    prepare_inputs(matrix, x, stride, num_rows);
    const Share share((matrix.num_outputs + W - 1) / W, thread, num_threads);
    for (int unit = share.begin; unit < share.end;) {
        const int vectors = std::min(4 - unit % 4, share.end - unit);
        auto each = [&](int row, int first_output, floats* sums) {
            for (int v = 0; v < vectors; ++v) {
                const int output = first_output + W * v;
                floats sum = sums[v];
                if (matrix.scales) sum *= load(matrix.scales + output);
                if (matrix.bias) sum += load(matrix.bias + output);
                write(row, output, sum);
            }
        };
        switch (vectors) {
            case 1: multiply_any<1>(matrix, W * unit, x, stride, num_rows, each); break;
            case 2: multiply_any<2>(matrix, W * unit, x, stride, num_rows, each); break;
            case 3: multiply_any<3>(matrix, W * unit, x, stride, num_rows, each); break;
            default: multiply_any<4>(matrix, W * unit, x, stride, num_rows, each); break;
        }
        unit += vectors;
    }
}

// silu(gate) * up, 2 W of each in a super-block.
void gated_linear(const Matrix& matrix, const Input* x, int stride, int num_rows, Input* out, int out_stride, int thread,
                  int num_threads) {
    const Share share(matrix.num_outputs / kSuper, thread, num_threads);
    prepare_inputs(matrix, x, stride, num_rows);
    for (int super = share.begin; super < share.end; ++super) {
        auto write = [&](int row, int, floats* sums) {
            for (int v = 0; v < 4 && matrix.scales; ++v) sums[v] *= load(matrix.scales + super * kSuper + W * v);
            for (int v = 0; v < 2; ++v) {
                const floats gate = sums[v];
                const floats decay = exp_of(-gate > 88.0f ? all(88.0f) : -gate);
                narrow(gate / (1.0f + decay) * sums[v + 2], out + (size_t)row * out_stride + super * 2 * W + W * v);
            }
        };
        multiply_any<4>(matrix, super * kSuper, x, stride, num_rows, write);
    }
}

// --- the parts of a layer --------------------------------------------------------------------------------------------

float inverse_rms(const float* x, int width, float eps) {
    floats sum = {};
    for (int i = 0; i < width; i += W) sum = fused(load(x + i), load(x + i), sum);
    return 1.0f / std::sqrt(sum_of(sum) / width + eps);
}

template <class Output>
void norm_row(const float* x, const float* weight, int width, float eps, Output* out) {
    const float scale = inverse_rms(x, width, eps);
    for (int i = 0; i < width; i += W) narrow(load(x + i) * scale * load(weight + i), out + i);
}

void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += W) {
        const floats a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
}

// Norm (Qwen3) and rotation of one head.
void prepare_head(float* x, const float* norm, const Model& model, int position) {
    const int E = model.head_width;
    if (norm) norm_row(x, norm, E, model.norm_eps, x);
    rotate(x, model.cos + (size_t)position * (E / 2), model.sin + (size_t)position * (E / 2), E / 2);
}

template <class Output>
void narrow_row(const float* x, int width, Output* out) {
    for (int i = 0; i < width; i += W) narrow(load(x + i), out + i);
}

// --- attention -------------------------------------------------------------------------------------------------------
// A few queries at a time (the heads of a key-value group, and neighbouring rows of a slot) go over the same stretch of the cache, so
// that a key is read and widened once for all of them. Stretches are kStretch positions whatever the pass, and threads share them
// out: each gives the largest score, the sum of exponentials and the weighted values, put together in order at the end. Vectors of a
// head are 2 W numbers at a time, the even ones before the odd ones, as `widen_pairs` has them.

constexpr int kStretch = 256;
#ifdef __AVX512F__
constexpr int kQueries = 4;      // 4 queries x 4 keys of sums fit the 32 registers
#else
constexpr int kQueries = 2;
#endif
constexpr int kTileRows = 8;
constexpr int kLargestHead = 128;

// The sums of four vectors.
inline __m128 sums_of(const floats* x) {
#ifdef __AVX512F__
    const __m512 x0 = (__m512)x[0], x1 = (__m512)x[1], x2 = (__m512)x[2], x3 = (__m512)x[3];
    const __m512d a = (__m512d)(_mm512_unpacklo_ps(x0, x1) + _mm512_unpackhi_ps(x0, x1));
    const __m512d b = (__m512d)(_mm512_unpacklo_ps(x2, x3) + _mm512_unpackhi_ps(x2, x3));
    const __m512 whole = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
    const __m256 half = _mm512_castps512_ps256(whole) + (__m256)_mm512_extractf64x4_pd((__m512d)whole, 1);
#else
    const __m256 x0 = (__m256)x[0], x1 = (__m256)x[1], x2 = (__m256)x[2], x3 = (__m256)x[3];
    const __m256d a = (__m256d)(_mm256_unpacklo_ps(x0, x1) + _mm256_unpackhi_ps(x0, x1));
    const __m256d b = (__m256d)(_mm256_unpacklo_ps(x2, x3) + _mm256_unpackhi_ps(x2, x3));
    const __m256 half = (__m256)_mm256_unpacklo_pd(a, b) + (__m256)_mm256_unpackhi_pd(a, b);
#endif
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

// A head's numbers as queries are kept for products with keys.
inline void store_query(const float* x, int E, Input* out) {
#ifdef __AVX512BF16__
    narrow_row(x, E, out);
#else
    for (int i = 0; i < E; ++i) out[i / (2 * W) * 2 * W + i % 2 * W + i % (2 * W) / 2] = x[i];
#endif
}

template <int E>
struct Key {
#ifdef __AVX512BF16__
    __m512bh parts[E / (2 * W)];
    explicit Key(const bf16* at) {
        for (int i = 0; i < E / (2 * W); ++i) parts[i] = (__m512bh)_mm512_loadu_si512(at + 2 * W * i);
    }
    floats times(const Input* query) const {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < E / (2 * W); ++i)
            sum = _mm512_dpbf16_ps(sum, parts[i], (__m512bh)_mm512_loadu_si512(query + 2 * W * i));
        return (floats)sum;
    }
#else
    Pairs parts[E / (2 * W)];
    explicit Key(const bf16* at) {
        for (int i = 0; i < E / (2 * W); ++i) parts[i] = widen_pairs(at + 2 * W * i);
    }
    floats times(const Input* query) const {
        floats sum = {};
        for (int i = 0; i < E / (2 * W); ++i) {
            sum = fused(parts[i].even, load(query + 2 * W * i), sum);
            sum = fused(parts[i].odd, load(query + 2 * W * i + W), sum);
        }
        return sum;
    }
#endif
};

// What one query makes of one stretch.
struct Part {
    float largest, total;
    float* sums;  // [E], even ones before odd ones
};

// QUERIES queries over the same stretch; `lengths[q]` of its keys are in the past of query q, at least one.
template <int E, int QUERIES>
void attend(const Input* const* queries, const int* lengths, const bf16* keys, const bf16* values, float scale, Part* parts) {
    alignas(64) float scores[QUERIES][kStretch];
    int longest = 0;
    for (int q = 0; q < QUERIES; ++q) longest = std::max(longest, lengths[q]);
    for (int t = 0; t < longest; t += 4) {
        floats sums[QUERIES][4];
        for (int j = 0; j < 4; ++j) {
            const Key<E> key(keys + (size_t)std::min(t + j, longest - 1) * E);
            for (int q = 0; q < QUERIES; ++q) sums[q][j] = key.times(queries[q]);
        }
        for (int q = 0; q < QUERIES; ++q) _mm_storeu_ps(scores[q] + t, sums_of(sums[q]) * scale);
    }
    for (int q = 0; q < QUERIES; ++q) {
        float* own = scores[q];
        const int length = lengths[q], whole = (length + W - 1) / W * W;
        for (int t = length; t < whole; ++t) own[t] = -INFINITY;
        floats largest = all(-INFINITY);
        for (int t = 0; t < whole; t += W) largest = load(own + t) > largest ? load(own + t) : largest;
        float most = largest[0];
        for (int i = 1; i < W; ++i) most = std::max(most, largest[i]);
        floats totals = {};
        for (int t = 0; t < whole; t += W) {
            store(own + t, exp_of(load(own + t) - most));
            for (int i = std::max(t, length); i < t + W; ++i) own[i] = 0;  // exactly: a longer neighbour must not change the sums
            totals += load(own + t);
        }
        for (int t = whole; t < longest; ++t) own[t] = 0;
        parts[q].largest = most;
        parts[q].total = sum_of(totals);
    }
    constexpr int SLICE = W == 16 && E % (4 * W) == 0 ? 2 : 1;  // times 2 W numbers of a head at a time
    for (int first = 0; first < E; first += SLICE * 2 * W) {
        Pairs sums[QUERIES][SLICE] = {};
        for (int t = 0; t < longest; ++t)
            for (int i = 0; i < SLICE; ++i) {
                const Pairs value = widen_pairs(values + (size_t)t * E + first + 2 * W * i);
                for (int q = 0; q < QUERIES; ++q) {
                    sums[q][i].even = fused(all(scores[q][t]), value.even, sums[q][i].even);
                    sums[q][i].odd = fused(all(scores[q][t]), value.odd, sums[q][i].odd);
                }
            }
        for (int q = 0; q < QUERIES; ++q)
            for (int i = 0; i < SLICE; ++i) {
                store(parts[q].sums + first + 2 * W * i, sums[q][i].even);
                store(parts[q].sums + first + 2 * W * i + W, sums[q][i].odd);
            }
    }
}

template <int E>
void attend_some(int num_queries, const Input* const* queries, const int* lengths, const bf16* keys, const bf16* values,
                 float scale, Part* parts) {
    switch (num_queries) {
        case 1: attend<E, 1>(queries, lengths, keys, values, scale, parts); break;
        case 2: attend<E, 2>(queries, lengths, keys, values, scale, parts); break;
        case 3: attend<E, std::min(3, kQueries)>(queries, lengths, keys, values, scale, parts); break;
        default: attend<E, kQueries>(queries, lengths, keys, values, scale, parts); break;
    }
}

// The stretches of one query, in order, to its output.
void put_together(const Part* parts, int num_parts, int E, Input* out) {
    float largest = -INFINITY, total = 0;
    for (int i = 0; i < num_parts; ++i) largest = std::max(largest, parts[i].largest);
    alignas(64) float sums[kLargestHead] = {}, row[kLargestHead];
    for (int i = 0; i < num_parts; ++i) {
        const float share = exp_of(all(parts[i].largest - largest))[0];
        total += share * parts[i].total;
        for (int e = 0; e < E; e += W) store(sums + e, fused(all(share), load(parts[i].sums + e), load(sums + e)));
    }
    const float inverse = 1.0f / total;
    for (int e = 0; e < E; ++e) row[e] = inverse * sums[e / (2 * W) * 2 * W + e % 2 * W + e % (2 * W) / 2];
    narrow_row(row, E, out);
}

// Neighbouring rows of one slot, at consecutive positions. Each key-value group and stretch of theirs is an item of work.
struct Tile {
    int first_row, num_rows, num_stretches, first_item;
};

struct Workspace {
    std::vector<float> hidden, query_key_value, part_sums;
    std::vector<Input> normed, queries, attended, activated, last;
    std::vector<Tile> tiles;
    std::vector<Part> parts;  // [N, H, stretches]
};

// Returns the number of items.
int make_tiles(int num_rows, const int* positions, const int* slots, int num_groups, std::vector<Tile>& tiles) {
    tiles.clear();
    int num_items = 0;
    for (int n = 0; n < num_rows; ++n) {
        const bool goes_on = n > 0 && slots[n] == slots[n - 1] && positions[n] == positions[n - 1] + 1;
        if (!goes_on || tiles.back().num_rows == kTileRows) tiles.push_back({n, 0, 0, 0});
        ++tiles.back().num_rows;
        tiles.back().num_stretches = positions[n] / kStretch + 1;
    }
    for (Tile& tile : tiles) {
        tile.first_item = num_items;
        num_items += num_groups * tile.num_stretches;
    }
    return num_items;
}

// The queries of one key-value group over one stretch; those that have no other are finished at once.
template <int E>
void attend_tile(const Tile& tile, int group, int stretch, const Model& model, const Layer& layer, const int* positions, int slot,
                 const Input* queries, Part* parts, int max_stretches, Input* attended) {
    const int H = model.num_heads, G = model.num_kv_heads, first = stretch * kStretch;
    const size_t at = (((size_t)slot * G + group) * model.max_length + first) * E;
    const Input* some[kQueries];
    int lengths[kQueries], places[kQueries], count = 0;
    auto flush = [&] {
        Part own[kQueries];
        for (int q = 0; q < count; ++q) own[q] = parts[(size_t)places[q] * max_stretches + stretch];
        attend_some<E>(count, some, lengths, layer.keys + at, layer.values + at, 1.0f / std::sqrt((float)E), own);
        for (int q = 0; q < count; ++q) {
            parts[(size_t)places[q] * max_stretches + stretch] = own[q];
            if (positions[places[q] / H] < kStretch) put_together(own + q, 1, E, attended + (size_t)places[q] * E);
        }
        count = 0;
    };
    for (int n = tile.first_row; n < tile.first_row + tile.num_rows; ++n)
        for (int head = group * (H / G); head < (group + 1) * (H / G); ++head) {
            const int length = std::min(positions[n] + 1 - first, kStretch);
            if (length <= 0) continue;
            places[count] = n * H + head;
            some[count] = queries + (size_t)places[count] * E;
            lengths[count] = length;
            if (++count == kQueries) flush();
        }
    if (count > 0) flush();
}

}  // namespace

// Weights [outputs, inputs] row by row into super-blocks of zeros, TOGETHER neighbouring inputs of an output side by side; `order[i]` is
// the row that becomes output i. The last block is padded, and so are inputs.
template <int TOGETHER, class From, class To>
void pack(const From* weights, const int* order, int num_outputs, int num_inputs, int num_padded, int offset, To* blocks,
          int num_threads) {
#pragma omp parallel for num_threads(num_threads)
    for (int output = 0; output < num_outputs; ++output) {
        To* to = blocks + (size_t)(output / kSuper) * num_padded * kSuper + TOGETHER * (output % kSuper);
        const From* from = weights + (size_t)order[output] * num_inputs;
        for (int i = 0; i < num_inputs; ++i)
            to[(size_t)(i / TOGETHER) * TOGETHER * kSuper + i % TOGETHER] = (To)(from[i] + offset);
    }
}

extern "C" {

void livedraft_pack_bf16(const bf16* weights, const int* order, int num_outputs, int num_inputs, bf16* blocks, int num_threads) {
    pack<2>(weights, order, num_outputs, num_inputs, num_inputs, 0, blocks, num_threads);
}

void livedraft_pack_int8(const int8_t* weights, const int* order, int num_outputs, int num_inputs, uint8_t* blocks,
                         int num_threads) {
    pack<4>(weights, order, num_outputs, num_inputs, kRounded * num_rounded_blocks(num_inputs), 128, blocks, num_threads);
}

// Levels [outputs, inputs] with float16 scales and offsets [outputs, inputs / 32], offsets of 4 bits only.
void livedraft_pack_blocks(const int8_t* levels, const uint16_t* scales, const uint16_t* offsets, const int* order, int num_outputs,
                           int num_inputs, int bits, char* blocks, int num_threads) {
    const int num_blocks = num_inputs / 32, per_word = 32 / bits, header = kSuper * (bits == 4 ? 2 : 1);
    const size_t bytes = (size_t)kSuper * 4 * bits + 2 * header;
#pragma omp parallel for num_threads(num_threads)
    for (int output = 0; output < num_outputs; ++output) {
        const int lane = output % kSuper, row = order[output];
        for (int b = 0; b < num_blocks; ++b) {
            char* block = blocks + ((size_t)(output / kSuper) * num_blocks + b) * bytes;
            ((uint16_t*)block)[lane] = scales[(size_t)row * num_blocks + b];
            if (bits == 4) ((uint16_t*)block)[kSuper + lane] = offsets[(size_t)row * num_blocks + b];
            for (int word = 0; word < bits; ++word) {
                uint32_t packed = 0;
                for (int i = 0; i < per_word; ++i) {
                    const uint32_t level = (uint8_t)levels[(size_t)row * num_inputs + 32 * b + word * per_word + i];
                    packed |= (level & ((1u << bits) - 1)) << (bits * i);
                }
                ((uint32_t*)(block + 2 * header))[word * kSuper + lane] = packed;
            }
        }
    }
}

// Bytes of packed blocks for so many outputs, padded to whole super-blocks.
int64_t livedraft_block_bytes(int num_outputs, int num_inputs, int bits) {
    const int64_t bytes = bits == 4 ? Block<4>::kBytes : Block<8>::kBytes;
    return (int64_t)((num_outputs + kSuper - 1) / kSuper) * (num_inputs / 32) * bytes;
}

int64_t livedraft_int8_bytes(int num_outputs, int num_inputs) {
    return (int64_t)((num_outputs + kSuper - 1) / kSuper) * kSuper * kRounded * num_rounded_blocks(num_inputs);
}

int livedraft_super_block() { return kSuper; }

// Ask the system for the tiles' registers, once a process; 0 where it refuses and this library must not be used.
int livedraft_may_run() {
#ifdef LIVEDRAFT_TILES
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return 1;
#endif
}

void* livedraft_workspace() { return new Workspace(); }
void livedraft_free_workspace(void* workspace) { delete static_cast<Workspace*>(workspace); }

// Write N tokens into their slots at their positions; logits [R, head outputs] at the rows asked for.
void livedraft_step(const Model* model_, void* workspace_, int num_rows, const int* tokens, const int* positions,
                    const int* slots, int num_logits, const int* logit_rows, float* logits, int num_threads) {
    const Model& model = *model_;
    Workspace& work = *static_cast<Workspace*>(workspace_);
    const int N = num_rows, D = model.width, F = model.feed_forward_width;
    const int H = model.num_heads, G = model.num_kv_heads, E = model.head_width, X = H * E, QKV = (H + 2 * G) * E;
    const int QKV_stride = (QKV + kSuper - 1) / kSuper * kSuper;
    auto grow = [](auto& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    };
    grow(work.hidden, (size_t)N * D);
    grow(work.normed, padded_rows(N) * D);
    grow(work.query_key_value, (size_t)N * QKV_stride);
    grow(work.queries, (size_t)N * X);
    grow(work.attended, padded_rows(N) * X);
    grow(work.activated, padded_rows(N) * F);
    grow(work.last, padded_rows(std::max(1, num_logits)) * D);
    const int num_items = make_tiles(N, positions, slots, G, work.tiles);
    int max_stretches = 1;
    for (const Tile& tile : work.tiles) max_stretches = std::max(max_stretches, tile.num_stretches);
    const size_t num_parts = (size_t)N * H * max_stretches;
    grow(work.part_sums, num_parts * E);
    grow(work.parts, num_parts);
    for (size_t i = 0; i < num_parts; ++i) work.parts[i].sums = work.part_sums.data() + i * E;
    float* hidden = work.hidden.data();
    float* qkv = work.query_key_value.data();
    Input *normed = work.normed.data(), *queries = work.queries.data(), *attended = work.attended.data();

#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        [[maybe_unused]] const Tiles tiles;
        const Share rows(N, thread, threads);
        for (int n = rows.begin; n < rows.end; ++n)
            for (int i = 0; i < D; i += W)
                store(hidden + (size_t)n * D + i, widen(model.embedding + (size_t)tokens[n] * D + i));
        for (int index = 0; index < model.num_layers; ++index) {
            const Layer& layer = model.layers[index];
            for (int n = rows.begin; n < rows.end; ++n)
                norm_row(hidden + (size_t)n * D, layer.attention_norm, D, model.norm_eps, normed + (size_t)n * D);
#pragma omp barrier
            linear(layer.query_key_value, normed, D, N, thread, threads, [&](int n, int output, floats sum) {
                store(qkv + (size_t)n * QKV_stride + output, sum);
            });
#pragma omp barrier
            const Share heads(N * (H + 2 * G), thread, threads);
            for (int item = heads.begin; item < heads.end; ++item) {
                const int n = item / (H + 2 * G), head = item % (H + 2 * G);
                float* x = qkv + (size_t)n * QKV_stride + (size_t)head * E;
                const int g = head < H + G ? head - H : head - H - G;
                const size_t at = (((size_t)slots[n] * G + g) * model.max_length + positions[n]) * E;
                if (head < H) {
                    prepare_head(x, layer.query_norm, model, positions[n]);
                    store_query(x, E, queries + (size_t)n * X + (size_t)head * E);
                } else if (head < H + G) {
                    prepare_head(x, layer.key_norm, model, positions[n]);
                    narrow_row(x, E, layer.keys + at);
                } else {
                    narrow_row(x, E, layer.values + at);
                }
            }
#pragma omp barrier
            const Share items(num_items, thread, threads);
            const Tile* tile = work.tiles.data();
            for (int item = items.begin; item < items.end; ++item) {
                while (item >= tile->first_item + G * tile->num_stretches) ++tile;
                const int group = (item - tile->first_item) / tile->num_stretches;
                const int stretch = (item - tile->first_item) % tile->num_stretches;
                auto run = [&](auto attend_this) {
                    attend_this(*tile, group, stretch, model, layer, positions, slots[tile->first_row], queries,
                                work.parts.data(), max_stretches, attended);
                };
                switch (E) {
                    case 32: run(attend_tile<32>); break;
                    case 64: run(attend_tile<64>); break;
                    case 96: run(attend_tile<96>); break;
                    default: run(attend_tile<128>); break;
                }
            }
            if (max_stretches > 1) {
#pragma omp barrier
                for (int n = rows.begin; n < rows.end; ++n)
                    for (int at = n * H; at < (n + 1) * H && positions[n] >= kStretch; ++at)
                        put_together(work.parts.data() + (size_t)at * max_stretches, positions[n] / kStretch + 1, E,
                                     attended + (size_t)at * E);
            }
#pragma omp barrier
            auto add = [&](int n, int output, floats sum) {
                float* to = hidden + (size_t)n * D + output;
                store(to, load(to) + sum);
            };
            linear(layer.attention_output, attended, X, N, thread, threads, add);
#pragma omp barrier
            for (int n = rows.begin; n < rows.end; ++n)
                norm_row(hidden + (size_t)n * D, layer.feed_forward_norm, D, model.norm_eps, normed + (size_t)n * D);
#pragma omp barrier
            gated_linear(layer.gate_up, normed, D, N, work.activated.data(), F, thread, threads);
#pragma omp barrier
            linear(layer.down, work.activated.data(), F, N, thread, threads, add);
#pragma omp barrier
        }
        const Share wanted(num_logits, thread, threads);
        for (int r = wanted.begin; r < wanted.end; ++r)
            norm_row(hidden + (size_t)logit_rows[r] * D, model.final_norm, D, model.norm_eps, work.last.data() + (size_t)r * D);
#pragma omp barrier
        const int V = model.head.num_outputs;
        if (num_logits > 0)
            linear(model.head, work.last.data(), D, num_logits, thread, threads, [&](int r, int output, floats sum) {
                std::memcpy(logits + (size_t)r * V + output, &sum, sizeof(float) * std::min(W, V - output));
            });
    }
}

}  // extern "C"
