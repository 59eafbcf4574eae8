// One pass of a Llama-like decoder in bf16 on a CPU: all layers in one parallel region.
//
// Why beside torch: a pass of a small model is some three hundred small operations there, and each evicts the next one's code and
// data from the caches. Here it is one call that streams every weight once. `Decoder` in decoder.py is the slow twin.
//
// A row's numbers do not depend on how many rows are in the pass, nor on the number of threads: every output is summed by one thread,
// over the inputs in order. So verification of k drafted tokens gives bit for bit what plain decoding gives.
//
// Weights are bf16, or int8 with one scale an output (half the bytes to read). They lie in super-blocks of four vectors of outputs,
// kSuper = 4 W: [outputs / kSuper][inputs / 2][kSuper][2], so that a thread reads them from front to back. Activations are float32;
// where the CPU multiplies pairs of bf16 itself (AVX512-BF16) they are rounded to bf16 as they enter a product, elsewhere (AVX512,
// AVX2) weights are widened in registers, which is a shift.
//
// Legend: W floats of a vector register, N rows of this pass, D width, F feed-forward width, H query heads, G key-value heads,
// E head width, T cache positions.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;

extern "C" {

struct Matrix {
    const void* blocks;
    const float* scales;  // [outputs padded to 64]: the blocks are int8; null: they are bf16
    const float* bias;    // [outputs padded to 64], or null
    int num_outputs;
    int num_inputs;
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

// --- one vector register ---------------------------------------------------------------------------------------------
// The compiler's own vector types (GCC, Clang) spell most of it; what they cannot say is in the intrinsics of the two widths.

#ifdef __AVX512F__
constexpr int W = 16;
constexpr int kMaxTile = 6;      // rows multiplied with a block at a time: 6 rows x 4 vectors of sums fit the 32 registers
#else
constexpr int W = 8;
constexpr int kMaxTile = 3;      // of 16 registers
#endif
constexpr int kSuper = 4 * W;
constexpr int kPrefetch = 1024;  // bytes ahead

typedef float floats __attribute__((vector_size(4 * W)));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef int16_t shorts __attribute__((vector_size(2 * W)));
typedef uint16_t halves __attribute__((vector_size(2 * W)));

template <class Vector>
inline Vector load_as(const void* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline floats load(const float* from) { return load_as<floats>(from); }
inline void store(float* to, floats x) { std::memcpy(to, &x, sizeof x); }
inline floats all(float x) { return x - floats{}; }

inline floats widen(const bf16* x) {
    return (floats)(__builtin_convertvector(load_as<halves>(x), ints) << 16);
}

// 2 W neighbouring bf16 as the even ones and the odd ones.
struct Pairs {
    floats even, odd;
};

inline Pairs widen_pairs(const bf16* x) {
    const ints both = load_as<ints>(x);
    return {(floats)(both << 16), (floats)(both & (ints{} + (int)0xffff0000))};
}

inline Pairs widen_pairs(const int8_t* x) {
    const ints both = __builtin_convertvector(load_as<shorts>(x), ints);
    return {__builtin_convertvector((both << 24) >> 24, floats), __builtin_convertvector(both >> 8, floats)};
}

#ifdef __AVX512F__
inline float sum_of(floats x) { return _mm512_reduce_add_ps((__m512)x); }
#else
inline float sum_of(floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
#endif

// Rounded to the nearest bf16, ties to even; a NaN stays one.
inline void narrow(floats x, bf16* out) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const ints bits = (ints)x;
    const ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const halves result = __builtin_convertvector(x == x ? rounded : ints{} + 0x7fc0, halves);
    std::memcpy(out, &result, sizeof result);
#endif
}

inline void narrow(floats x, float* out) { store(out, x); }

// exp for x <= about 88, to a few units in the last place (Cephes' polynomial).
inline floats exp_of(floats x) {
    x = x < -87.3f ? all(-87.3f) : x;  // a NaN stays one: the engine must see it
    const floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const floats n = (x * 1.44269504f + shift) - shift;
    floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    p = p * r * r + (r + 1.0f);
    return p * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
}

// --- products --------------------------------------------------------------------------------------------------------
// `Input` is what activations are stored as, and `multiply_add` one pair of inputs into sums of W outputs.

#ifdef __AVX512BF16__
using Input = bf16;
using WeightPairs = __m512bh;
using InputPair = __m512bh;

inline WeightPairs load_weights(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline WeightPairs load_weights(const int8_t* at) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)at);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

inline InputPair load_pair(const Input* at) { return (__m512bh)_mm512_set1_epi32(load_as<int>(at)); }

inline floats multiply_add(WeightPairs weights, InputPair inputs, floats sum) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, weights, inputs);
}
#else
using Input = float;
using WeightPairs = Pairs;
using InputPair = Pairs;

inline WeightPairs load_weights(const bf16* at) { return widen_pairs(at); }
inline WeightPairs load_weights(const int8_t* at) { return widen_pairs(at); }
inline InputPair load_pair(const Input* at) { return {all(at[0]), all(at[1])}; }

inline floats multiply_add(const WeightPairs& weights, const InputPair& inputs, floats sum) {
    sum = weights.even * inputs.even + sum;
    return weights.odd * inputs.odd + sum;
}
#endif

// Sums of ROWS rows with VECTORS x W neighbouring outputs of one super-block, inputs in order.
template <int ROWS, int VECTORS, class Weight>
inline void multiply(const Weight* block, const Input* x, int stride, int num_inputs, floats (*sums)[VECTORS]) {
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

// write(row, first output, vectors of sums) for all rows; VECTORS of them.
template <int VECTORS, class Weight, class Write>
void multiply_rows(const Matrix& matrix, int first_output, const Input* x, int stride, int num_rows, const Write& write) {
    const Weight* block = (const Weight*)matrix.blocks + (size_t)(first_output / kSuper) * matrix.num_inputs * kSuper +
                          2 * (first_output % kSuper);
    for (int row = 0; row < num_rows;) {
        const int left = num_rows - row;
        const int rows = left > kMaxTile && left < 2 * kMaxTile ? (left + 1) / 2 : std::min(left, kMaxTile);
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

// This thread's share of some units: vectors of outputs, super-blocks, heads or rows.
struct Share {
    int begin, end;
    Share(int num_units, int thread, int num_threads)
        : begin((int)((long long)num_units * thread / num_threads)),
          end((int)((long long)num_units * (thread + 1) / num_threads)) {}
};

template <class Weight, class Write>
void linear_of(const Matrix& matrix, const Input* x, int stride, int num_rows, int thread, int num_threads, const Write& write) {
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
            case 1: multiply_rows<1, Weight>(matrix, W * unit, x, stride, num_rows, each); break;
            case 2: multiply_rows<2, Weight>(matrix, W * unit, x, stride, num_rows, each); break;
            case 3: multiply_rows<3, Weight>(matrix, W * unit, x, stride, num_rows, each); break;
            default: multiply_rows<4, Weight>(matrix, W * unit, x, stride, num_rows, each); break;
        }
        unit += vectors;
    }
}

template <class Write>
void linear(const Matrix& matrix, const Input* x, int stride, int num_rows, int thread, int num_threads, const Write& write) {
    if (matrix.scales)
        linear_of<int8_t>(matrix, x, stride, num_rows, thread, num_threads, write);
    else
        linear_of<bf16>(matrix, x, stride, num_rows, thread, num_threads, write);
}

// silu(gate) * up, 2 W of each in a super-block.
void gated_linear(const Matrix& matrix, const Input* x, int stride, int num_rows, Input* out, int out_stride, int thread,
                  int num_threads) {
    const Share share(matrix.num_outputs / kSuper, thread, num_threads);
    for (int super = share.begin; super < share.end; ++super) {
        auto write = [&](int row, int, floats* sums) {
            for (int v = 0; v < 4 && matrix.scales; ++v) sums[v] *= load(matrix.scales + super * kSuper + W * v);
            for (int v = 0; v < 2; ++v) {
                const floats gate = sums[v];
                const floats decay = exp_of(-gate > 88.0f ? all(88.0f) : -gate);
                narrow(gate / (1.0f + decay) * sums[v + 2], out + (size_t)row * out_stride + super * 2 * W + W * v);
            }
        };
        if (matrix.scales)
            multiply_rows<4, int8_t>(matrix, super * kSuper, x, stride, num_rows, write);
        else
            multiply_rows<4, bf16>(matrix, super * kSuper, x, stride, num_rows, write);
    }
}

// --- the parts of a layer --------------------------------------------------------------------------------------------

float inverse_rms(const float* x, int width, float eps) {
    floats sum = {};
    for (int i = 0; i < width; i += W) sum = load(x + i) * load(x + i) + sum;
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

// One query head's products with one key, E = 2 W * PAIRS.
template <int PAIRS>
struct Query {
#ifdef __AVX512BF16__
    __m512bh pairs[PAIRS];
    explicit Query(const Input* query) {
        for (int i = 0; i < PAIRS; ++i) pairs[i] = (__m512bh)_mm512_loadu_si512(query + 2 * W * i);
    }
    float dot(const bf16* key) const {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < PAIRS; ++i) sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(key + 2 * W * i), pairs[i]);
        return _mm512_reduce_add_ps(sum);
    }
#else
    Pairs pairs[PAIRS];
    explicit Query(const Input* query) {
        for (int i = 0; i < 2 * W * PAIRS; ++i) (i % 2 ? pairs[i / (2 * W)].odd : pairs[i / (2 * W)].even)[i / 2 % W] = query[i];
    }
    float dot(const bf16* key) const {
        floats sum = {};
        for (int i = 0; i < PAIRS; ++i) sum = multiply_add(widen_pairs(key + 2 * W * i), pairs[i], sum);
        return sum_of(sum);
    }
#endif
};

// One query head over `length` keys and values.
template <int E>
void attend(const Input* query_, const bf16* keys, const bf16* values, int length, float scale, float* scores, Input* out) {
    const Query<E / (2 * W)> query(query_);
    float largest = -INFINITY;
    for (int t = 0; t < length; ++t) {
        scores[t] = query.dot(keys + (size_t)t * E) * scale;
        largest = std::max(largest, scores[t]);
    }
    for (int t = length; t % W; ++t) scores[t] = -INFINITY;  // exp_of makes it 1e-38, next to a total of at least 1
    floats totals = {};
    for (int t = 0; t < length; t += W) {
        const floats p = exp_of(load(scores + t) - largest);
        store(scores + t, p);
        totals += p;
    }
    floats sums[E / W] = {};
    for (int t = 0; t < length; ++t)
        for (int i = 0; i < E / W; ++i) sums[i] = scores[t] * widen(values + (size_t)t * E + W * i) + sums[i];
    const float inverse = 1.0f / sum_of(totals);
    for (int i = 0; i < E / W; ++i) narrow(sums[i] * inverse, out + W * i);
}

struct Workspace {
    std::vector<float> hidden, query_key_value;
    std::vector<Input> normed, queries, attended, activated, last;
    std::vector<std::vector<float>> scores;
};

}  // namespace

// Weights [outputs, inputs] row by row into super-blocks; `order[i]` is the row that becomes output i, the last block is padded.
template <class Weight>
void pack(const Weight* weights, const int* order, int num_outputs, int num_inputs, Weight* blocks, int num_threads) {
    const int num_supers = (num_outputs + kSuper - 1) / kSuper;
#pragma omp parallel for num_threads(num_threads)
    for (int super = 0; super < num_supers; ++super) {
        Weight* to = blocks + (size_t)super * num_inputs * kSuper;
        for (int lane = 0; lane < kSuper; ++lane) {
            const int output = super * kSuper + lane;
            const int row = output < num_outputs ? order[output] : -1;
            for (int i = 0; i < num_inputs; ++i)
                to[(size_t)(i / 2) * 2 * kSuper + 2 * lane + i % 2] = row < 0 ? 0 : weights[(size_t)row * num_inputs + i];
        }
    }
}

extern "C" {

void livedraft_pack_bf16(const bf16* weights, const int* order, int num_outputs, int num_inputs, bf16* blocks, int num_threads) {
    pack(weights, order, num_outputs, num_inputs, blocks, num_threads);
}

void livedraft_pack_int8(const int8_t* weights, const int* order, int num_outputs, int num_inputs, int8_t* blocks,
                         int num_threads) {
    pack(weights, order, num_outputs, num_inputs, blocks, num_threads);
}

int livedraft_super_block() { return kSuper; }

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
    grow(work.normed, (size_t)N * D);
    grow(work.query_key_value, (size_t)N * QKV_stride);
    grow(work.queries, (size_t)N * X);
    grow(work.attended, (size_t)N * X);
    grow(work.activated, (size_t)N * F);
    grow(work.last, (size_t)std::max(1, num_logits) * D);
    if ((int)work.scores.size() < num_threads) work.scores.resize(num_threads);
    for (auto& one : work.scores) grow(one, model.max_length + 16);
    float* hidden = work.hidden.data();
    float* qkv = work.query_key_value.data();
    Input *normed = work.normed.data(), *queries = work.queries.data(), *attended = work.attended.data();
    const float scale = 1.0f / std::sqrt((float)E);

#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
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
                    narrow_row(x, E, queries + (size_t)n * X + (size_t)head * E);
                } else if (head < H + G) {
                    prepare_head(x, layer.key_norm, model, positions[n]);
                    narrow_row(x, E, layer.keys + at);
                } else {
                    narrow_row(x, E, layer.values + at);
                }
            }
#pragma omp barrier
            const Share pairs(N * H, thread, threads);
            for (int item = pairs.begin; item < pairs.end; ++item) {
                const int n = item / H, head = item % H;
                const size_t slot = ((size_t)slots[n] * G + head / (H / G)) * model.max_length * E;
                const size_t at = (size_t)n * X + (size_t)head * E;
                float* scores = work.scores[thread].data();
                const bf16 *keys = layer.keys + slot, *values = layer.values + slot;
                const int length = positions[n] + 1;
                switch (E) {
                    case 32: attend<32>(queries + at, keys, values, length, scale, scores, attended + at); break;
                    case 64: attend<64>(queries + at, keys, values, length, scale, scores, attended + at); break;
                    case 96: attend<96>(queries + at, keys, values, length, scale, scores, attended + at); break;
                    default: attend<128>(queries + at, keys, values, length, scale, scores, attended + at); break;
                }
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
