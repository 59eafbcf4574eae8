// The most likely token of rows of logits, which greedy verification asks for; and the K most likely ones with the logarithm of each
// row's sum of exponentials, which is what a trace keeps of a round.
//
// Why beside torch: its topk of fifty thousand logits takes a twentieth of a whole pass of a small model. Here a row is read once for
// the maxima of blocks, of which the K-th largest bounds the K-th largest logit from below; few logits pass that bound, and only
// blocks with such are looked at again. The slow twins are in top_tokens.py.
//
// Legend: V vocabulary, K tokens kept, W floats of a vector register (vectors.hpp).

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "vectors.hpp"

namespace {

constexpr int kBlock = 4 * W;

inline floats larger(floats a, floats b) { return a > b ? a : b; }

// One row in blocks of kBlock logits; the last one is filled up with minus infinity.
struct Row {
    const float* logits;
    int V, num_blocks;
    alignas(64) float last[kBlock];

    Row(const float* logits, int V) : logits(logits), V(V), num_blocks((V + kBlock - 1) / kBlock) {
        const int start = V / kBlock * kBlock;
        for (int i = 0; i < kBlock; ++i) last[i] = start + i < V ? logits[start + i] : -INFINITY;
    }

    const float* block(int b) const { return (b + 1) * kBlock <= V ? logits + (size_t)b * kBlock : last; }
};

// Of each block, never a NaN; returns the largest of them.
float block_maxima(const Row& row, std::vector<float>& maxima) {
    maxima.resize(row.num_blocks);
    float most = -INFINITY;
    for (int b = 0; b < row.num_blocks; ++b) {
        const float* at = row.block(b);
        const floats best = larger(larger(load(at), load(at + W)), larger(load(at + 2 * W), load(at + 3 * W)));
        maxima[b] = -INFINITY;
        for (int i = 0; i < W; ++i) maxima[b] = best[i] > maxima[b] ? best[i] : maxima[b];
        most = std::max(most, maxima[b]);
    }
    return most;
}

float log_sum_exp(const Row& row, float most) {
    floats totals[4] = {};
    for (int b = 0; b < row.num_blocks; ++b)
        for (int i = 0; i < 4; ++i) {
            const floats x = load(row.block(b) + i * W) - most;
            totals[i] += x < -87.0f ? floats{} : exp_of(x);  // nothing at all of what fills up the last block
        }
    return most + std::log(sum_of((totals[0] + totals[1]) + (totals[2] + totals[3])));
}

// What a thread needs from row to row.
struct Scratch {
    std::vector<float> maxima, bounds;
    std::vector<std::pair<float, int>> found;
};

// As IEEE half precision, rounded to nearest.
uint16_t as_half(float x) { return _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0); }

// The K largest, falling, less the normaliser; of equal ones the lower token first. Returns what mass all others have.
// `scratch.maxima` are this row's.
float top(const Row& row, int K, float normaliser, Scratch& scratch, uint16_t* log_probs, int32_t* ids) {
    const std::vector<float>& maxima = scratch.maxima;
    float bound = -INFINITY;
    if (K < row.num_blocks) {
        scratch.bounds = maxima;
        std::nth_element(scratch.bounds.begin(), scratch.bounds.begin() + (K - 1), scratch.bounds.end(), std::greater<float>());
        bound = scratch.bounds[K - 1];
    }
    auto& found = scratch.found;
    found.clear();
    for (int b = 0; b < row.num_blocks; ++b) {
        if (maxima[b] < bound) continue;
        const float* at = row.block(b);
        for (int i = 0, token = b * kBlock; i < kBlock && token < row.V; ++i, ++token)
            if (at[i] >= bound) found.emplace_back(at[i], token);
    }
    const int count = std::min<int>(K, found.size());
    std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    float mass = 0;
    for (int k = 0; k < K; ++k) {
        const float log_prob = k < count ? found[k].first - normaliser : -INFINITY;
        mass += std::exp(log_prob);
        log_probs[k] = as_half(log_prob);
        ids[k] = k < count ? found[k].second : 0;
    }
    return std::max(0.0f, 1.0f - mass);
}

// Returns the first place of the largest logit; `best` gets it, or a NaN where the row has one.
int find_best(const Row& row, float* best) {
    float most = -INFINITY;
    int at_block = 0;
    ints is_nan = {};
    for (int b = 0; b < row.num_blocks; ++b) {
        const float* at = row.block(b);
        const floats parts[4] = {load(at), load(at + W), load(at + 2 * W), load(at + 3 * W)};
        for (const floats& part : parts) is_nan |= part != part;
        const floats highest = larger(larger(parts[0], parts[1]), larger(parts[2], parts[3]));
        const ints is_more = highest > all(most);
        bool any = false;
        for (int i = 0; i < W; ++i) any |= is_more[i] != 0;
        if (!any) continue;
        for (int i = 0; i < W; ++i) most = highest[i] > most ? highest[i] : most;
        at_block = b;
    }
    *best = most;
    for (int i = 0; i < W; ++i)
        if (is_nan[i]) *best = NAN;
    const float* at = row.block(at_block);
    for (int i = 0; i < kBlock; ++i)
        if (at[i] == most) return at_block * kBlock + i;
    return 0;
}

}  // namespace

// Of R rows of V logits each: the largest one and the first token that has it; a NaN where the row has one.
extern "C" void livedraft_best(int R, const float* const* rows, int V, float* values, int32_t* ids, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(std::max(1, std::min(num_threads, R)))
    for (int r = 0; r < R; ++r) ids[r] = find_best(Row(rows[r], V), values + r);
}

// Of R rows of V logits each, finite or minus infinity: the normalisers [R]; and of row r, where places[r] is not negative, the K most
// likely tokens, their log-probabilities as halves, and the mass of all others, at places[r] of [C, K], [C, K] and [C].
extern "C" void livedraft_top(int R, const float* const* rows, const int* places, int V, int K, uint16_t* log_probs, int32_t* ids,
                              float* tail_mass, float* normalisers, int num_threads) {
#pragma omp parallel num_threads(std::max(1, std::min(num_threads, R)))
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int r = 0; r < R; ++r) {
            const Row row(rows[r], V);
            normalisers[r] = log_sum_exp(row, block_maxima(row, scratch.maxima));
            const size_t at = places[r] * (size_t)K;
            if (places[r] >= 0) tail_mass[places[r]] = top(row, K, normalisers[r], scratch, log_probs + at, ids + at);
        }
    }
}
