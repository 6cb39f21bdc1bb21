/* What a decode step spends its time on beside large matrix products, on any number of OpenMP threads.
 *
 * Compiled once for each type that activations and the cache are kept in: float32, or with -DBFLOAT16 bfloat16. All
 * arithmetic is in float32 either way; `get` and `put` are where the types meet.
 * Plain C with a plain C ABI: `library.py` calls it through ctypes with the addresses of torch's tensors, so it builds
 * in seconds, without torch's headers, and outlives torch's versions. Vectors are GCC's and clang's own: one register
 * of AVX-512 or of AVX2, as the compiler is told; what depends on it stands in "Registers". `build.py` says for which
 * processors. Letters as in attention.py: G KV heads, D head dimension.
 * Every width is a multiple of 16; the caller sees to that. Nothing here allocates but scratch of a call's own.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define SHUFFLE __builtin_shufflevector

/* ---- Registers ---- */

#ifdef __AVX512F__
#define LANES 16
#define EACH_LANE 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#else
#define LANES 8
#define EACH_LANE 0, 1, 2, 3, 4, 5, 6, 7
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* aligned as torch has it */

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec value) { *(loose *)to = value; }
INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec choose(ints mask, vec yes, vec no) { return (vec)((mask & (ints)yes) | (~mask & (ints)no)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE ints larger_int(ints a, ints b) { return (ints)choose(a > b, (vec)a, (vec)b); }

/* Bytes and 16-bit numbers are widened by intrinsics: GCC 12 takes `__builtin_convertvector` apart into single ones. */
#ifdef __AVX512F__
INLINE ints widen_halves(const uint16_t *from) { return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)); }
INLINE ints widen_bytes(const uint8_t *from) { return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)); }
INLINE ints widen_signed(const uint8_t *from) { return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)); }
INLINE vec to_floats(ints q) { return (vec)_mm512_cvtepi32_ps((__m512i)q); }
INLINE void narrow(uint16_t *to, ints from) { _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16((__m512i)from)); }

INLINE float sum(vec v)
{
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

INLINE float most(vec v)
{
    v = larger(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = larger(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = larger(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return v[0] > v[1] ? v[0] : v[1];
}

/* The sums of as many vectors as one has lanes, in order: folding pairs into one takes a third of single sums. */
INLINE vec sums(vec v[LANES])
{
    for (int i = 0; i < 8; i++)
        v[i] = SHUFFLE(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        v[i] = SHUFFLE(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLE(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        v[i] = SHUFFLE(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

/* Of pairs of numbers: the first of each twice, the second twice, both exchanged. */
INLINE vec firsts(vec v) { return SHUFFLE(v, v, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14); }
INLINE vec seconds(vec v) { return SHUFFLE(v, v, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15); }
INLINE vec exchanged(vec v) { return SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }
#else
INLINE ints widen_halves(const uint16_t *from) { return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)); }
INLINE ints widen_bytes(const uint8_t *from) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)); }
INLINE ints widen_signed(const uint8_t *from) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)); }
INLINE vec to_floats(ints q) { return (vec)_mm256_cvtepi32_ps((__m256i)q); }
INLINE void narrow(uint16_t *to, ints from)
{
    __m256i wide = (__m256i)from;
    __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
    _mm_storeu_si128((void *)to, _mm_packus_epi32(low, high));
}

INLINE float sum(vec v)
{
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

INLINE float most(vec v)
{
    v = larger(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = larger(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return v[0] > v[1] ? v[0] : v[1];
}

INLINE vec sums(vec v[LANES])
{
    for (int i = 0; i < 4; i++)
        v[i] = SHUFFLE(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        v[i] = SHUFFLE(v[i], v[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(v[i], v[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
}

INLINE vec firsts(vec v) { return SHUFFLE(v, v, 0, 0, 2, 2, 4, 4, 6, 6); }
INLINE vec seconds(vec v) { return SHUFFLE(v, v, 1, 1, 3, 3, 5, 5, 7, 7); }
INLINE vec exchanged(vec v) { return SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
#endif

/* ---- Types ---- */

#ifdef BFLOAT16
typedef uint16_t real; /* the upper half of a float */

INLINE vec get(const real *from) { return (vec)(widen_halves(from) << 16); }

/* To the nearest, ties to even; no number stays no number, so that a broken product is found where it is sampled. */
INLINE void put(real *to, vec value)
{
    typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
    bits whole = (bits)value, near = (whole + (((whole >> 16) & 1) + 0x7fff)) >> 16;
    ints broken = value != value;
    narrow(to, ((ints)near & ~broken) | (0x7fc0 & broken));
}
#else
typedef float real;

INLINE vec get(const real *from) { return load(from); }
INLINE void put(real *to, vec value) { store(to, value); }
#endif

/* `count` numbers as floats: where they lie, or in `room`. */
INLINE const float *floats(const real *from, float *room, int64_t count)
{
#ifdef BFLOAT16
    for (int64_t i = 0; i < count; i += LANES) store(room + i, get(from + i));
    return room;
#else
    (void)room, (void)count;
    return from;
#endif
}

/* e^x to about one unit in the last place; exactly 0 where the true value is no normal float, -inf included. */
INLINE vec exponential(vec x)
{
    const vec least = all(-87.3f), greatest = all(88.0f), magic = all(12582912.0f); /* 1.5 × 2^23 rounds to integers */
    ints kept = x > least;
    x = choose(kept, x, least);
    x = choose(x < greatest, x, greatest);
    vec k = (x * 1.44269504f + magic) - magic;
    vec f = x - k * 0.693359375f + k * 2.12194440e-4f; /* ln 2 in two parts, the first exact in few bits */
    vec p = all(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    ints power = (__builtin_convertvector(k, ints) + 127) << 23;
    return (vec)((ints)(p * (vec)power) & kept);
}

/* ---- Attention over the paged cache ---- */

#define TOKENS 64  /* keys that are scored before their values are summed: both stay in the first-level cache */
#define QUERIES 32 /* at most, of one tile: rows × heads that share a KV head */
#define WIDEST 256 /* head dimension */
#define PARTS (LANES / 4) /* of a value at a time: with four queries they fill half the registers with sums */

typedef struct {
    const real *q;         /* rows of `q_stride` numbers, heads first */
    int64_t q_stride;
    const real *layer;     /* [blocks, block_tokens, 2, G, D] */
    const int64_t *tables; /* block ids, rows of `table_width` */
    const int64_t *tiles;  /* [num_tiles, 4]: first row, rows, tokens that the first row attends to, row of the table */
    int64_t table_width, block_tokens, heads, kv_heads, dimension;
    float scale;
    int64_t window; /* tokens that a row attends to at most; 0 for all */
} Attention;

typedef struct {
    float sum[QUERIES][WIDEST]; /* of the values, weighed relative to the highest score so far */
    float highest[QUERIES], weight[QUERIES];
} Softmax;

INLINE void scores_of(float *out, const float *q, const float *const keys[], int tokens, float scale, int dimension)
{
    for (int first = 0; first < tokens; first += LANES) {
        vec product[LANES];
        for (int t = 0; t < LANES; t++) {
            vec part = load(q) * load(keys[first + t]);
            for (int d = LANES; d < dimension; d += LANES) part += load(q + d) * load(keys[first + t] + d);
            product[t] = part;
        }
        store(out + first, sums(product) * scale);
    }
}

/* Not inlined: a dozen copies of it would take the compiler half a minute. */
static __attribute__((noinline)) void scores(float *out, const float *q, const float *const keys[], int tokens,
                                             float scale, int dimension)
{
    if (dimension == 64) /* constants, so that the query stays in registers */
        scores_of(out, q, keys, tokens, scale, 64);
    else if (dimension == 128)
        scores_of(out, q, keys, tokens, scale, 128);
    else
        scores_of(out, q, keys, tokens, scale, dimension);
}

/* Add tokens to several queries' sums at once, so that a value that was loaded serves all of them. */
INLINE void add_values(float *const sum_of[], const float weights[][TOKENS], const float rescale[], int queries,
                       const float *const values[], int tokens, int dimension)
{
    for (int from = 0; from < dimension; from += PARTS * LANES) {
        int parts = (dimension - from) / LANES < PARTS ? (dimension - from) / LANES : PARTS;
        vec kept[4][PARTS];
        for (int j = 0; j < queries; j++)
            for (int d = 0; d < parts; d++) kept[j][d] = load(sum_of[j] + from + d * LANES) * rescale[j];
        for (int t = 0; t < tokens; t++)
            for (int d = 0; d < parts; d++) {
                vec value = load(values[t] + from + d * LANES);
                for (int j = 0; j < queries; j++) kept[j][d] += weights[j][t] * value;
            }
        for (int j = 0; j < queries; j++)
            for (int d = 0; d < parts; d++) store(sum_of[j] + from + d * LANES, kept[j][d]);
    }
}

/* Scores of a query, of which it sees those from `behind` up to `visible`, become weights relative to the highest so far;
 * returns what its sums are to be multiplied with. */
INLINE float weigh_scores(Softmax *s, int query, float *weights, int behind, int visible, int tokens)
{
    const ints lane = {EACH_LANE};
    vec highest = all(s->highest[query]), total = all(0);
    for (int t = 0; t < tokens; t += LANES) {
        ints seen = (lane < visible - t) & (lane >= behind - t);
        vec score = choose(seen, load(weights + t), all(-__builtin_inff()));
        store(weights + t, score);
        highest = larger(highest, score);
    }
    float peak = most(highest);
    peak = peak > -3e38f ? peak : -3e38f; /* a query that sees none of these tokens: -inf minus -inf is no number */
    float rescale = exponential(all(s->highest[query] - peak))[0];
    for (int t = 0; t < tokens; t += LANES) {
        vec weight = exponential(load(weights + t) - peak);
        store(weights + t, weight);
        total += weight;
    }
    s->highest[query] = peak;
    s->weight[query] = s->weight[query] * rescale + sum(total);
    return rescale;
}

/* Up to four queries over up to TOKENS tokens, of which query j sees those from `behind[j]` up to `visible[j]`. */
INLINE void attend_some(const float *const q[], Softmax *s, int first, int queries, const int behind[],
                        const int visible[], const float *const keys[], const float *const values[], int dimension,
                        float scale)
{
    float weights[4][TOKENS], rescale[4], *sum_of[4];
    int longest = 0;
    for (int j = 0; j < queries; j++) longest = visible[j] > longest ? visible[j] : longest;
    longest = (longest + LANES - 1) / LANES * LANES;
    for (int j = 0; j < queries; j++) {
        scores(weights[j], q[j], keys, longest, scale, dimension);
        rescale[j] = weigh_scores(s, first + j, weights[j], behind[j], visible[j], longest);
        sum_of[j] = s->sum[first + j];
    }
    add_values(sum_of, (const float(*)[TOKENS])weights, rescale, queries, values, longest, dimension);
}

/* One tile's queries of one KV head over the tokens [from, to). */
INLINE void attend_tokens(const Attention *a, const int64_t *tile, int64_t head, int64_t from, int64_t to, Softmax *s,
                          int dimension)
{
    int group = (int)(a->heads / a->kv_heads), queries = (int)tile[1] * group;
    const int64_t *table = a->tables + tile[3] * a->table_width;
    int64_t width = 2 * a->kv_heads * dimension, size = a->block_tokens;
    for (int j = 0; j < queries; j++) {
        s->highest[j] = -__builtin_inff();
        s->weight[j] = 0;
        memset(s->sum[j], 0, sizeof(float) * (size_t)dimension);
    }
    float asked[4][WIDEST], known[2][TOKENS * WIDEST]; /* packed: strides of a power of two fight for the same cache lines */
    for (int64_t base = from; base < to; base += TOKENS) {
        const float *keys[TOKENS], *values[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            int64_t at = base + t < to ? base + t : to - 1; /* beyond the end: any token, weighed with 0 */
            const real *key = a->layer + (table[at / size] * size + at % size) * width + head * dimension;
            keys[t] = floats(key, known[0] + t * dimension, dimension);
            values[t] = floats(key + a->kv_heads * dimension, known[1] + t * dimension, dimension);
        }
        for (int first = 0; first < queries;) {
            const float *q[4];
            int behind[4], visible[4], some = queries - first < 4 ? queries - first : 4;
            if (group == 3 && some == 4) some = 3;
            for (int j = 0; j < some; j++) {
                int row = (first + j) / group;
                int64_t end = tile[2] + row < to ? tile[2] + row : to, left = end - base;
                const real *query = a->q + (tile[0] + row) * a->q_stride + (head * group + (first + j) % group) * dimension;
                q[j] = floats(query, asked[j], dimension);
                visible[j] = left < 0 ? 0 : left < TOKENS ? (int)left : TOKENS;
                left = tile[2] + row - a->window - base;
                behind[j] = !a->window || left < 0 ? 0 : left < TOKENS ? (int)left : TOKENS;
            }
            switch (some) { /* constants, so that sums stay in registers */
            case 1: attend_some(q, s, first, 1, behind, visible, keys, values, dimension, a->scale); break;
            case 2: attend_some(q, s, first, 2, behind, visible, keys, values, dimension, a->scale); break;
            case 3: attend_some(q, s, first, 3, behind, visible, keys, values, dimension, a->scale); break;
            default: attend_some(q, s, first, 4, behind, visible, keys, values, dimension, a->scale);
            }
            first += some;
        }
    }
}

/* Results of several shares of the context become one. */
static void merge(Softmax *into, const Softmax *other, int queries, int dimension)
{
    for (int j = 0; j < queries; j++) {
        float peak = into->highest[j] > other->highest[j] ? into->highest[j] : other->highest[j];
        float mine = exponential(all(into->highest[j] - peak))[0], theirs = exponential(all(other->highest[j] - peak))[0];
        for (int d = 0; d < dimension; d++) into->sum[j][d] = into->sum[j][d] * mine + other->sum[j][d] * theirs;
        into->weight[j] = into->weight[j] * mine + other->weight[j] * theirs;
        into->highest[j] = peak;
    }
}

/* The first token that any row of the tile attends to. */
INLINE int64_t first_token(const Attention *a, const int64_t *tile)
{
    return a->window && tile[2] > a->window ? tile[2] - a->window : 0;
}

#if defined(BFLOAT16) && defined(__AVX512F__)
#include "attention_rows.h"
#endif

/* `together`: KV heads from `head` on that are computed at once, more than one in tiles of one row alone. */
static void attend_task(const Attention *a, const int64_t *tile, int64_t head, int64_t together, int64_t from, int64_t to,
                        Softmax *s)
{
#if defined(BFLOAT16) && defined(__AVX512F__)
    if (tile[1] == 1) {
        attend_task_row(a, tile, head, together, from, to, s);
        return;
    }
#else
    (void)together;
#endif
    if (a->dimension == 64)
        attend_tokens(a, tile, head, from, to, s, 64);
    else if (a->dimension == 128)
        attend_tokens(a, tile, head, from, to, s, 128);
    else
        attend_tokens(a, tile, head, from, to, s, (int)a->dimension);
}

static void write_out(const Attention *a, const int64_t *tile, int64_t head, const Softmax *s, real *out)
{
    int group = (int)(a->heads / a->kv_heads);
    for (int j = 0; j < tile[1] * group; j++) {
        real *to = out + ((tile[0] + j / group) * a->heads + head * group + j % group) * a->dimension;
        float share = 1 / s->weight[j];
        for (int64_t d = 0; d < a->dimension; d += LANES) put(to + d, load(s->sum[j] + d) * share);
    }
}

/* out: [rows, heads, D]. `shares` > 1 splits every context, for batches too small to keep all threads busy.
 * Returns 0, or 1 when there is no memory for what the shares hold. */
int sluice_attend(real *out, const real *q, int64_t q_stride, const real *layer, const int64_t *tables,
                  int64_t table_width, const int64_t *tiles, int64_t num_tiles, int64_t block_tokens, int64_t heads,
                  int64_t kv_heads, int64_t dimension, float scale, int64_t shares, int64_t window)
{
    const Attention a = {q,     q_stride, layer,    tables,    tiles, table_width, block_tokens,
                         heads, kv_heads, dimension, scale, window};
    int64_t together = 1;
#if defined(BFLOAT16) && defined(__AVX512F__)
    if (are_rows(&a, tiles, num_tiles)) together = kv_heads;
#endif
    Attention tasks = a; /* what a task computes, as if its heads shared one KV head */
    tasks.kv_heads = kv_heads / together;
    if (shares == 1) {
#pragma omp parallel for schedule(dynamic, 1)
        for (int64_t task = 0; task < num_tiles * tasks.kv_heads; task++) {
            Softmax s;
            const int64_t *tile = tiles + task / tasks.kv_heads * 4;
            attend_task(&a, tile, task % tasks.kv_heads, together, first_token(&a, tile), tile[2] + tile[1] - 1, &s);
            write_out(&tasks, tile, task % tasks.kv_heads, &s, out);
        }
        return 0;
    }
    Softmax *parts = malloc(sizeof(Softmax) * (size_t)(num_tiles * tasks.kv_heads * shares));
    if (!parts) return 1;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_tiles * tasks.kv_heads * shares; task++) {
        const int64_t *tile = tiles + task / shares / tasks.kv_heads * 4;
        int64_t from = first_token(&a, tile), tokens = tile[2] + tile[1] - 1 - from, share = task % shares;
        attend_task(&a, tile, task / shares % tasks.kv_heads, together, from + tokens * share / shares,
                    from + tokens * (share + 1) / shares, parts + task);
    }
    for (int64_t task = 0; task < num_tiles * tasks.kv_heads; task++) {
        const int64_t *tile = tiles + task / tasks.kv_heads * 4;
        Softmax *s = parts + task * shares;
        for (int64_t share = 1; share < shares; share++)
            merge(s, s + share, (int)(tile[1] * heads / tasks.kv_heads), (int)dimension);
        write_out(&tasks, tile, task % tasks.kv_heads, s, out);
    }
    free(parts);
    return 0;
}

/* ---- What lies between the products ---- */

#define WORTH_THREADS 16384 /* values below which waking another thread costs more than it saves */

/* `out` may be `from`; `weight` may be null. */
INLINE void norm_row(real *out, const real *from, const real *weight, int64_t width, float epsilon)
{
    vec squares = all(0);
    for (int64_t i = 0; i < width; i += LANES) squares += get(from + i) * get(from + i);
    float scale = 1 / __builtin_sqrtf(sum(squares) / (float)width + epsilon);
    if (weight)
        for (int64_t i = 0; i < width; i += LANES) put(out + i, get(from + i) * scale * get(weight + i));
    else
        for (int64_t i = 0; i < width; i += LANES) put(out + i, get(from + i) * scale);
}

/* Rows over their root mean square; `weight` may be null. */
void sluice_norm(real *out, const real *x, const real *weight, int64_t rows, int64_t width, float epsilon)
{
#pragma omp parallel for if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) norm_row(out + row * width, x + row * width, weight, width, epsilon);
}

/* Turn q and k of qkv [rows, (heads + 2 G) D] to their positions, in place, and store k and v in the layer's cache.
 * `turns`: [positions, D/2] complex numbers. `norms`: [2, D], with which q and k are normed before; may be null. */
void sluice_turn_and_store(real *qkv, const float *turns, const int64_t *positions, real *layer,
                           const int64_t *kv_rows, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dimension,
                           const real *norms, float epsilon)
{
    int64_t width = (heads + 2 * kv_heads) * dimension, kept = 2 * kv_heads * dimension;
    const ints odd = (ints){EACH_LANE} & 1;
    const vec sign = to_floats(2 * odd - 1); /* -1 for the first of a pair */
#pragma omp parallel for if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float *turn = turns + positions[row] * dimension;
        real *own = qkv + row * width;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            if (norms) norm_row(own + head * dimension, own + head * dimension, norms + (head < heads ? 0 : dimension),
                                dimension, epsilon);
            for (int64_t d = 0; d < dimension; d += LANES) {
                real *at = own + head * dimension + d;
                vec value = get(at), angle = load(turn + d);
                put(at, value * firsts(angle) + exchanged(value) * seconds(angle) * sign);
            }
        }
        memcpy(layer + kv_rows[row] * kept, own + heads * dimension, sizeof(real) * (size_t)kept);
    }
}

/* out [rows, width] = silu(first half) × second half of gate_up [rows, 2 width]. */
void sluice_silu_mul(real *out, const real *gate_up, int64_t rows, int64_t width)
{
#pragma omp parallel for if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const real *gate = gate_up + row * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            vec value = get(gate + i);
            put(out + row * width + i, value / (1 + exponential(-value)) * get(up + i));
        }
    }
}

/* ---- Products with a GGUF file's own blocks of 32 weights, their scales widened to float32 ---- */

#define BLOCK 32
#define ROWS (LANES / 2) /* of x at a time: with two rows of weights they fill half the registers with sums */

typedef enum { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 } Kind; /* GGUF's own numbers */

INLINE int bytes_of_block(Kind kind) { return kind == Q8_0 ? 36 : kind == Q4_1 ? 24 : 20; }

/* A block as the numbers it stands for. Its scales are float32 already: unpacking halves would take longer than the
 * products. */
INLINE void read_block(Kind kind, const uint8_t *block, vec part[BLOCK / LANES])
{
    float scale, least;
    memcpy(&scale, block, sizeof scale);
    if (kind != Q8_0) { /* scale, least but for Q4_0, 16 bytes: weight i in the low half of byte i, i + 16 in the high */
        least = -8 * scale;
        if (kind == Q4_1) memcpy(&least, block + 4, sizeof least);
        const uint8_t *bytes = block + (kind == Q4_1 ? 8 : 4);
#ifdef __AVX512F__
        /* A block has but 16 different weights, as many as a register holds: each is looked up, by four bits. */
        __m512 known = (__m512)(to_floats((ints){EACH_LANE}) * scale + least);
        ints q = widen_bytes(bytes);
        part[0] = (vec)_mm512_permutexvar_ps((__m512i)q, known);
        part[1] = (vec)_mm512_permutexvar_ps((__m512i)(q >> 4), known);
#else
        for (int p = 0; p < 2; p++) {
            ints q = widen_bytes(bytes + p * LANES);
            part[p] = to_floats(q & 15) * scale + least;
            part[p + 2] = to_floats(q >> 4) * scale + least;
        }
#endif
    } else /* scale, 32 signed bytes */
        for (int p = 0; p < BLOCK / LANES; p++) part[p] = to_floats(widen_signed(block + 4 + p * LANES)) * scale;
}

/* `outs` rows of weights times `rows` rows of x. */
INLINE void multiply(Kind kind, real *out, const real *residual, int64_t out_width, const float *x, int64_t in_width,
                     const uint8_t *weights, int64_t row_bytes, int outs, int rows)
{
    vec product[LANES] = {};
    const int block_bytes = bytes_of_block(kind);
    for (int64_t at = 0; at < in_width / BLOCK; at++) {
        for (int o = 0; o < outs; o++) {
            vec part[BLOCK / LANES];
            read_block(kind, weights + o * row_bytes + at * block_bytes, part);
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < BLOCK / LANES; p++)
                    product[o * rows + r] += part[p] * load(x + r * in_width + at * BLOCK + p * LANES);
        }
    }
    vec total = sums(product);
    real row[LANES] = {0};
    if (residual) {
        for (int o = 0; o < outs; o++)
            for (int r = 0; r < rows; r++) row[o * rows + r] = residual[r * out_width + o];
        total += get(row);
    }
    put(row, total);
    for (int o = 0; o < outs; o++)
        for (int r = 0; r < rows; r++) out[r * out_width + o] = row[o * rows + r];
}

/* Four rows of weights, which stay in the first-level cache, times all rows of x. */
INLINE void multiply_four(Kind kind, real *out, const real *residual, int64_t out_width, const float *x,
                          int64_t in_width, const uint8_t *weights, int64_t row_bytes, int64_t rows)
{
    for (int64_t row = 0; row < rows;) {
        real *to = out + row * out_width;
        const real *plus = residual ? residual + row * out_width : 0;
        const float *from = x + row * in_width;
        if (rows - row >= ROWS) {
            multiply(kind, to, plus, out_width, from, in_width, weights, row_bytes, 2, ROWS);
            multiply(kind, to + 2, plus ? plus + 2 : 0, out_width, from, in_width, weights + 2 * row_bytes, row_bytes, 2,
                     ROWS);
            row += ROWS;
        } else if (LANES == 16 && rows - row >= 4) { /* four rows of weights fill a vector of sums */
            multiply(kind, to, plus, out_width, from, in_width, weights, row_bytes, 4, LANES / 4);
            row += 4;
        } else if (rows - row >= 2) {
            multiply(kind, to, plus, out_width, from, in_width, weights, row_bytes, 4, 2);
            row += 2;
        } else {
            multiply(kind, to, plus, out_width, from, in_width, weights, row_bytes, 4, 1);
            row++;
        }
    }
}

/* out [rows, out_width] = x [rows, in_width] times blocks [out_width, in_width] transposed, plus the residual, which
 * may be null. The weights are exactly what the file says; sums are in float32. out_width is a multiple of 4.
 * Returns 0, or 1 when there is no memory for x as floats. */
int sluice_multiply(real *out, const real *x, const uint8_t *weights, const real *residual, int64_t rows,
                    int64_t in_width, int64_t out_width, int64_t kind)
{
    int64_t row_bytes = in_width / BLOCK * bytes_of_block((Kind)kind);
    float *room = 0;
    if (sizeof(real) < sizeof(float) && !(room = malloc(sizeof(float) * (size_t)(rows * in_width)))) return 1;
    const float *wide = floats(x, room, rows * in_width);
#pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < out_width; o += 4) {
        const real *plus = residual ? residual + o : 0;
        if (kind == Q4_0)
            multiply_four(Q4_0, out + o, plus, out_width, wide, in_width, weights + o * row_bytes, row_bytes, rows);
        else if (kind == Q4_1)
            multiply_four(Q4_1, out + o, plus, out_width, wide, in_width, weights + o * row_bytes, row_bytes, rows);
        else
            multiply_four(Q8_0, out + o, plus, out_width, wide, in_width, weights + o * row_bytes, row_bytes, rows);
    }
    free(room);
    return 0;
}

#ifdef BFLOAT16
#include "integer_products.h"
#include "layers.h"
#endif
