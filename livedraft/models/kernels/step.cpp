// One pass of a Llama-like decoder in bf16 on a CPU with AVX512-BF16: all layers in one parallel region.
//
// Why beside torch: a pass of a small model is some three hundred small operations there, and each evicts the next one's code and
// data from the caches. Here it is one call that streams every weight once. `Decoder` in decoder.py is the slow twin.
//
// A row's numbers do not depend on how many rows are in the pass, nor on the number of threads: every output is summed by one thread,
// over the inputs in order. So verification of k drafted tokens gives bit for bit what plain decoding gives.
//
// Activations are float32; they are rounded to bf16 where they enter a product. Weights are bf16, or int8 with one scale an output
// (widened to bf16 in registers, which is exact: half the bytes to read). They lie in super-blocks of 64 outputs:
// [outputs / 64][inputs / 2][64][2], so that a thread reads them from front to back.
//
// Legend: N rows of this pass, D width, F feed-forward width, H query heads, G key-value heads, E head width, T cache positions.

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

constexpr int kSuper = 64;       // outputs of a super-block
constexpr int kMaxTile = 6;      // rows multiplied with a block at a time: 6 rows x 4 vectors of sums fit the registers
constexpr int kPrefetch = 1024;  // bytes ahead

inline __m512 widen(const bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline void narrow(__m512 x, bf16* out) { _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(x)); }

// exp for x <= about 88, to a few units in the last place (Cephes' polynomial).
inline __m512 exp512(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.3f), x);  // in this order a NaN stays one: the engine must see it
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// --- products --------------------------------------------------------------------------------------------------------

inline __m512bh load_weights(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline __m512bh load_weights(const int8_t* at) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)at);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

// Sums of ROWS rows with VECTORS x 16 neighbouring outputs of one super-block, inputs in order.
template <int ROWS, int VECTORS, class Weight>
inline void multiply(const Weight* block, const bf16* x, int stride, int num_inputs, __m512 (*sums)[VECTORS]) {
    for (int m = 0; m < ROWS; ++m)
        for (int v = 0; v < VECTORS; ++v) sums[m][v] = _mm512_setzero_ps();
    for (int pair = 0; pair < num_inputs / 2; ++pair, block += 2 * kSuper) {
        __m512bh w[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            _mm_prefetch((const char*)(block + 32 * v) + kPrefetch, _MM_HINT_T0);
            w[v] = load_weights(block + 32 * v);
        }
        for (int m = 0; m < ROWS; ++m) {
            int both;
            std::memcpy(&both, x + (size_t)m * stride + 2 * pair, 4);
            const __m512bh in = (__m512bh)_mm512_set1_epi32(both);
            for (int v = 0; v < VECTORS; ++v) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], w[v], in);
        }
    }
}

// write(row, first output, vectors of sums) for all rows; VECTORS of them.
template <int VECTORS, class Weight, class Write>
void multiply_rows(const Matrix& matrix, int first_output, const bf16* x, int stride, int num_rows, const Write& write) {
    const Weight* block = (const Weight*)matrix.blocks + (size_t)(first_output / kSuper) * matrix.num_inputs * kSuper +
                          2 * (first_output % kSuper);
    for (int row = 0; row < num_rows;) {
        const int left = num_rows - row;
        const int rows = left > kMaxTile && left < 2 * kMaxTile ? (left + 1) / 2 : std::min(left, kMaxTile);
        __m512 sums[kMaxTile][VECTORS];
        const bf16* from = x + (size_t)row * stride;
        switch (rows) {
            case 1: multiply<1, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 2: multiply<2, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 3: multiply<3, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 4: multiply<4, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            case 5: multiply<5, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
            default: multiply<6, VECTORS>(block, from, stride, matrix.num_inputs, sums); break;
        }
        for (int m = 0; m < rows; ++m) write(row + m, first_output, sums[m]);
        row += rows;
    }
}

// This thread's share of the outputs, in units of 16.
struct Share {
    int begin, end;
    Share(int num_units, int thread, int num_threads)
        : begin((int)((long long)num_units * thread / num_threads)),
          end((int)((long long)num_units * (thread + 1) / num_threads)) {}
};

template <class Weight, class Write>
void linear_of(const Matrix& matrix, const bf16* x, int stride, int num_rows, int thread, int num_threads, const Write& write) {
    const Share share((matrix.num_outputs + 15) / 16, thread, num_threads);
    for (int unit = share.begin; unit < share.end;) {
        const int vectors = std::min(4 - unit % 4, share.end - unit);
        auto each = [&](int row, int first_output, __m512* sums) {
            for (int v = 0; v < vectors; ++v) {
                const int output = first_output + 16 * v;
                __m512 sum = sums[v];
                if (matrix.scales) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(matrix.scales + output));
                if (matrix.bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(matrix.bias + output));
                write(row, output, sum);
            }
        };
        switch (vectors) {
            case 1: multiply_rows<1, Weight>(matrix, 16 * unit, x, stride, num_rows, each); break;
            case 2: multiply_rows<2, Weight>(matrix, 16 * unit, x, stride, num_rows, each); break;
            case 3: multiply_rows<3, Weight>(matrix, 16 * unit, x, stride, num_rows, each); break;
            default: multiply_rows<4, Weight>(matrix, 16 * unit, x, stride, num_rows, each); break;
        }
        unit += vectors;
    }
}

template <class Write>
void linear(const Matrix& matrix, const bf16* x, int stride, int num_rows, int thread, int num_threads, const Write& write) {
    if (matrix.scales)
        linear_of<int8_t>(matrix, x, stride, num_rows, thread, num_threads, write);
    else
        linear_of<bf16>(matrix, x, stride, num_rows, thread, num_threads, write);
}

// silu(gate) * up, 32 of each in a super-block.
void gated_linear(const Matrix& matrix, const bf16* x, int stride, int num_rows, bf16* out, int out_stride, int thread,
                  int num_threads) {
    const Share share(matrix.num_outputs / kSuper, thread, num_threads);
    for (int super = share.begin; super < share.end; ++super) {
        auto write = [&](int row, int, __m512* sums) {
            for (int v = 0; v < 4 && matrix.scales; ++v)
                sums[v] = _mm512_mul_ps(sums[v], _mm512_loadu_ps(matrix.scales + super * kSuper + 16 * v));
            for (int v = 0; v < 2; ++v) {
                const __m512 gate = sums[v];
                const __m512 one = _mm512_set1_ps(1.0f);
                const __m512 decay = exp512(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), gate), _mm512_set1_ps(88.0f)));
                const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, decay));
                narrow(_mm512_mul_ps(silu, sums[v + 2]), out + (size_t)row * out_stride + super * 32 + 16 * v);
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
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < width; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / width + eps);
}

void norm_row(const float* x, const float* weight, int width, float eps, bf16* out) {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, width, eps));
    for (int i = 0; i < width; i += 16)
        narrow(_mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)), out + i);
}

void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += 16) {
        const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + half + i);
        const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        _mm512_storeu_ps(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        _mm512_storeu_ps(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

// Norm (Qwen3) and rotation of one head.
void prepare_head(float* x, const float* norm, const Model& model, int position) {
    const int E = model.head_width;
    if (norm) {
        const __m512 scale = _mm512_set1_ps(inverse_rms(x, E, model.norm_eps));
        for (int i = 0; i < E; i += 16)
            _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(norm + i)));
    }
    rotate(x, model.cos + (size_t)position * (E / 2), model.sin + (size_t)position * (E / 2), E / 2);
}

void narrow_row(const float* x, int width, bf16* out) {
    for (int i = 0; i < width; i += 16) narrow(_mm512_loadu_ps(x + i), out + i);
}

// One query head over `length` keys and values; E = 16 * LANES.
template <int LANES>
void attend(const bf16* query, const bf16* keys, const bf16* values, int length, float scale, float* scores, bf16* out) {
    constexpr int E = 16 * LANES;
    __m512bh q[LANES / 2];
    for (int i = 0; i < LANES / 2; ++i) q[i] = (__m512bh)_mm512_loadu_si512(query + 32 * i);
    float largest = -INFINITY;
    for (int t = 0; t < length; ++t) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < LANES / 2; ++i)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(keys + (size_t)t * E + 32 * i), q[i]);
        scores[t] = _mm512_reduce_add_ps(sum) * scale;
        largest = std::max(largest, scores[t]);
    }
    for (int t = length; t % 16; ++t) scores[t] = -INFINITY;  // exp512 makes it next to nothing; see `total`
    float total = 0.0f;
    for (int t = 0; t < length; t += 16) {
        const __mmask16 mask = length - t >= 16 ? 0xffff : (__mmask16)((1 << (length - t)) - 1);
        const __m512 p = _mm512_maskz_mov_ps(
            mask, exp512(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, scores + t), _mm512_set1_ps(largest))));
        _mm512_mask_storeu_ps(scores + t, mask, p);
        total += _mm512_reduce_add_ps(p);
    }
    __m512 sums[LANES];
    for (int i = 0; i < LANES; ++i) sums[i] = _mm512_setzero_ps();
    for (int t = 0; t < length; ++t) {
        const __m512 p = _mm512_set1_ps(scores[t]);
        for (int i = 0; i < LANES; ++i) sums[i] = _mm512_fmadd_ps(p, widen(values + (size_t)t * E + 16 * i), sums[i]);
    }
    const __m512 inverse = _mm512_set1_ps(1.0f / total);
    for (int i = 0; i < LANES; ++i) narrow(_mm512_mul_ps(sums[i], inverse), out + 16 * i);
}

struct Workspace {
    std::vector<float> hidden, query_key_value;
    std::vector<bf16> normed, queries, attended, activated, last;
    std::vector<std::vector<float>> scores;
};

}  // namespace

extern "C" {

}  // extern "C"

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
    bf16 *normed = work.normed.data(), *queries = work.queries.data(), *attended = work.attended.data();
    const float scale = 1.0f / std::sqrt((float)E);

#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const Share rows(N, thread, threads);
        for (int n = rows.begin; n < rows.end; ++n)
            for (int i = 0; i < D; i += 16)
                _mm512_storeu_ps(hidden + (size_t)n * D + i, widen(model.embedding + (size_t)tokens[n] * D + i));
        for (int index = 0; index < model.num_layers; ++index) {
            const Layer& layer = model.layers[index];
            for (int n = rows.begin; n < rows.end; ++n)
                norm_row(hidden + (size_t)n * D, layer.attention_norm, D, model.norm_eps, normed + (size_t)n * D);
#pragma omp barrier
            linear(layer.query_key_value, normed, D, N, thread, threads, [&](int n, int output, __m512 sum) {
                _mm512_storeu_ps(qkv + (size_t)n * QKV_stride + output, sum);
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
                    case 32: attend<2>(queries + at, keys, values, length, scale, scores, attended + at); break;
                    case 64: attend<4>(queries + at, keys, values, length, scale, scores, attended + at); break;
                    case 96: attend<6>(queries + at, keys, values, length, scale, scores, attended + at); break;
                    default: attend<8>(queries + at, keys, values, length, scale, scores, attended + at); break;
                }
            }
#pragma omp barrier
            auto add = [&](int n, int output, __m512 sum) {
                float* to = hidden + (size_t)n * D + output;
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
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
            linear(model.head, work.last.data(), D, num_logits, thread, threads, [&](int r, int output, __m512 sum) {
                const int left = V - output;
                const __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
                _mm512_mask_storeu_ps(logits + (size_t)r * V + output, mask, sum);
            });
    }
}

}  // extern "C"
