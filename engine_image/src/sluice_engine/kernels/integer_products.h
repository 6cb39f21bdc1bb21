/* Products of quantised activations with a GGUF file's blocks of 32 weights: sums of products of bytes.
 *
 * A part of kernels.c, for activations in bfloat16. Every 32 values of a row of x become signed bytes and a scale of
 * their own (GGUF's Q8_1); a block's product is then exact in 32 bits, and is multiplied by both scales. Blocks are added
 * up in float32, in order: a row's result is the same, bit for bit, alone and among others.
 *
 * Weights lie as `Interleaved` in library.py has them, so that no sum runs across lanes: of GROUP rows one block after
 * the other, each as GROUP scales in half precision, for Q4_1 as many least values, and fours of bytes, row by row.
 */

#define GROUP 16

typedef struct {
    float scale, total; /* `total` is the sum of what the bytes stand for */
    int32_t sum;
    int8_t values[BLOCK];
} Quantised;

#ifdef __AVX512F__
INLINE ints to_ints(vec v) { return (ints)_mm512_cvtps_epi32((__m512)v); }
INLINE void narrow_to_bytes(int8_t *to, ints from) { _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8((__m512i)from)); }
INLINE int32_t most_int(ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
INLINE vec widen_float16(const uint8_t *from) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }
INLINE vec fused(vec a, vec b, vec plus) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)plus); }

/* Of each lane's four unsigned bytes of weights and four signed ones of x, the products' sum, added to `sum`. */
INLINE ints dot_bytes(ints sum, ints weights, const int8_t *x, int vnni)
{
    if (vnni) { /* as assembly: an intrinsic would want a third build, for processors with AVX-512 and these alone */
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const int32_t(*)[1])x));
        return sum;
    }
    int32_t four;
    memcpy(&four, x, sizeof four);
    __m512i pairs = _mm512_maddubs_epi16((__m512i)(weights & 0x7f7f7f7f), _mm512_set1_epi32(four));
    __m512i high = _mm512_maddubs_epi16((__m512i)((weights >> 7) & 0x01010101), _mm512_set1_epi32(four));
    return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)) + (ints)_mm512_madd_epi16(high, _mm512_set1_epi16(128));
}
#else
INLINE ints to_ints(vec v) { return (ints)_mm256_cvtps_epi32((__m256)v); }
INLINE void narrow_to_bytes(int8_t *to, ints from)
{
    __m256i wide = (__m256i)from;
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((void *)to, _mm_packs_epi16(halves, halves));
}
INLINE int32_t most_int(ints v)
{
    int32_t most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
INLINE vec widen_float16(const uint8_t *from) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from)); }
INLINE vec fused(vec a, vec b, vec plus) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)plus); }

/* The sum of two products of bytes has no room in 16 bits where a weight has eight: the highest is multiplied apart. */
INLINE ints dot_bytes(ints sum, ints weights, const int8_t *x, int vnni)
{
    (void)vnni;
    int32_t four;
    memcpy(&four, x, sizeof four);
    __m256i pairs = _mm256_maddubs_epi16((__m256i)(weights & 0x7f7f7f7f), _mm256_set1_epi32(four));
    __m256i high = _mm256_maddubs_epi16((__m256i)((weights >> 7) & 0x01010101), _mm256_set1_epi32(four));
    return sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) + (ints)_mm256_madd_epi16(high, _mm256_set1_epi16(128));
}
#endif

/* To the nearest, ties to even. What is no number is none in any product: the scale is no number then. */
INLINE void quantise(Quantised *to, const real *from)
{
    vec part[BLOCK / LANES], total = all(0);
    ints highest = {0};
    for (int p = 0; p < BLOCK / LANES; p++) {
        part[p] = get(from + p * LANES);
        ints size = (ints)part[p] & 0x7fffffff; /* ordered as integers as they are as numbers, and NaN above all */
        highest = (ints)larger_int(size, highest);
    }
    union {
        int32_t bits;
        float value;
    } most = {most_int(highest)};
    float steps = most.value > 1e-30f ? 127 / most.value : 0; /* less than that is nothing */
    to->scale = most.value / 127;
    for (int p = 0; p < BLOCK / LANES; p++) {
        ints rounded = to_ints(part[p] * steps);
        narrow_to_bytes(to->values + p * LANES, rounded);
        total += to_floats(rounded);
    }
    float counted = sum(total);
    to->sum = (int32_t)counted;
    to->total = counted * to->scale;
}

INLINE int64_t group_bytes(Kind kind) { return kind == Q8_0 ? 2 * GROUP + GROUP * BLOCK : (kind == Q4_1 ? 4 : 2) * GROUP + GROUP * BLOCK / 2; }

/* LANES rows of weights, from `lane` of their group, times `rows` rows of x. */
INLINE void multiply_lanes(Kind kind, int vnni, real *out, const real *residual, int64_t out_width, const Quantised *x,
                           int64_t blocks, const uint8_t *group, int lane, int rows)
{
    vec product[ROWS] = {};
    const int middle = kind == Q4_0 ? 8 : kind == Q8_0 ? 128 : 0; /* what unsigned weights are above signed ones */
    for (int64_t at = 0; at < blocks; at++, group += group_bytes(kind)) {
        const uint8_t *bytes = group + (kind == Q4_1 ? 4 : 2) * GROUP + 4 * lane;
        vec scale = widen_float16(group + 2 * lane), least = all(0);
        if (kind == Q4_1) least = widen_float16(group + 2 * GROUP + 2 * lane);
        ints weights[BLOCK / 4];
        for (int i = 0; i < (kind == Q8_0 ? 8 : 4); i++) {
            ints four;
            memcpy(&four, bytes + i * 4 * GROUP, sizeof four);
            if (kind == Q8_0) {
                weights[i] = four;
            } else { /* weight i in the low half of byte i, weight i + 16 in the high */
                weights[i] = four & 0x0f0f0f0f;
                weights[i + 4] = (four >> 4) & 0x0f0f0f0f;
            }
        }
        for (int r = 0; r < rows; r++) {
            const Quantised *own = x + r * blocks + at;
            ints whole = (ints){0} - middle * own->sum;
            for (int i = 0; i < BLOCK / 4; i++) whole = dot_bytes(whole, weights[i], own->values + 4 * i, vnni);
            product[r] = fused(to_floats(whole), scale * own->scale, product[r]);
            if (kind == Q4_1) product[r] = fused(least, all(own->total), product[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        vec total = product[r];
        if (residual) total += get(residual + r * out_width);
        put(out + r * out_width, total);
    }
}

/* A group of weights, which stays in the first-level cache, times all rows of x. */
INLINE void multiply_group(Kind kind, int vnni, real *out, const real *residual, int64_t out_width, const Quantised *x,
                           int64_t blocks, const uint8_t *group, int64_t rows)
{
    for (int lane = 0; lane < GROUP; lane += LANES)
        for (int64_t row = 0; row < rows;) {
            real *to = out + row * out_width + lane;
            const real *plus = residual ? residual + row * out_width + lane : 0;
            const Quantised *from = x + row * blocks;
            if (rows - row >= ROWS) {
                multiply_lanes(kind, vnni, to, plus, out_width, from, blocks, group, lane, ROWS);
                row += ROWS;
            } else if (rows - row >= 4) {
                multiply_lanes(kind, vnni, to, plus, out_width, from, blocks, group, lane, 4);
                row += 4;
            } else if (rows - row >= 2) {
                multiply_lanes(kind, vnni, to, plus, out_width, from, blocks, group, lane, 2);
                row += 2;
            } else {
                multiply_lanes(kind, vnni, to, plus, out_width, from, blocks, group, lane, 1);
                row++;
            }
        }
}

/* Each a function of its own: constants make eight of one, and none of them is inlined into another. */
#define MULTIPLY_GROUP(name, kind, vnni)                                                                              \
    static __attribute__((noinline)) void name(real *out, const real *residual, int64_t out_width, const Quantised *x, \
                                               int64_t blocks, const uint8_t *group, int64_t rows)                    \
    {                                                                                                                 \
        multiply_group(kind, vnni, out, residual, out_width, x, blocks, group, rows);                                 \
    }
MULTIPLY_GROUP(multiply_q4_0, Q4_0, 0)
MULTIPLY_GROUP(multiply_q4_1, Q4_1, 0)
MULTIPLY_GROUP(multiply_q8_0, Q8_0, 0)
#ifdef __AVX512F__
MULTIPLY_GROUP(multiply_q4_0_vnni, Q4_0, 1)
MULTIPLY_GROUP(multiply_q4_1_vnni, Q4_1, 1)
MULTIPLY_GROUP(multiply_q8_0_vnni, Q8_0, 1)
#else
#define multiply_q4_0_vnni multiply_q4_0
#define multiply_q4_1_vnni multiply_q4_1
#define multiply_q8_0_vnni multiply_q8_0
#endif

/* out [rows, out_width] = x [rows, in_width], quantised into `room`, times interleaved blocks [out_width, in_width]
 * transposed, plus the residual, which may be null or `out`. */
static void multiply_quantised(real *out, const real *x, const uint8_t *weights, const real *residual, int64_t rows,
                               int64_t in_width, int64_t out_width, Kind kind, int vnni, Quantised *room)
{
    int64_t blocks = in_width / BLOCK, bytes = blocks * group_bytes(kind);
    void (*const multiply_one)(real *, const real *, int64_t, const Quantised *, int64_t, const uint8_t *, int64_t) =
        kind == Q4_0   ? vnni ? multiply_q4_0_vnni : multiply_q4_0
        : kind == Q4_1 ? vnni ? multiply_q4_1_vnni : multiply_q4_1
        : vnni         ? multiply_q8_0_vnni
                       : multiply_q8_0;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < rows * blocks; block++) quantise(room + block, x + block * BLOCK);
#pragma omp for schedule(static) nowait
        for (int64_t group = 0; group < out_width / GROUP; group++)
            multiply_one(out + group * GROUP, residual ? residual + group * GROUP : 0, out_width, room, blocks,
                         weights + group * bytes, rows);
    }
}

/* The same for callers from outside. out_width is a multiple of GROUP. `vnni`: the processor adds products of bytes in
 * one step. Returns 0, or 1 when there is no memory for x in bytes. */
int sluice_multiply_quantised(real *out, const real *x, const uint8_t *weights, const real *residual, int64_t rows,
                              int64_t in_width, int64_t out_width, int64_t kind, int64_t vnni)
{
    Quantised *room = malloc(sizeof(Quantised) * (size_t)(rows * in_width / BLOCK));
    if (!room) return 1;
    multiply_quantised(out, x, weights, residual, rows, in_width, out_width, (Kind)kind, (int)vnni, room);
    free(room);
    return 0;
}
