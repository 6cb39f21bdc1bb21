/* Attention of single rows in bfloat16: of each request that decodes. A key and a value serve the few heads that share
 * them, so they are widened in registers, and there is no copy to come back to. What a row reads of memory is most of its cost:
 * where it may, one task takes all KV heads and touches tokens whole, in the order in which they lie.
 *
 * A part of kernels.c. Numbers are multiplied and added in the same order as for tiles of more rows.
 */

#define SHARING 4 /* queries at most that are computed at once */

/* Up to four queries over up to TOKENS tokens, whose keys lie at `rows` and their values `apart` numbers behind. */
INLINE void attend_rows(const float *const q[], Softmax *s, int first, int queries, int behind, int visible,
                        const real *const rows[], int64_t apart, int dimension, float scale)
{
    float weights[SHARING][TOKENS], rescale[SHARING];
    int longest = (visible + LANES - 1) / LANES * LANES;
    for (int from = 0; from < longest; from += LANES) {
        vec product[SHARING][LANES];
        for (int t = 0; t < LANES; t++) {
            vec part[SHARING], key = get(rows[from + t]);
            for (int j = 0; j < queries; j++) part[j] = load(q[j]) * key;
            for (int d = LANES; d < dimension; d += LANES) {
                key = get(rows[from + t] + d);
                for (int j = 0; j < queries; j++) part[j] += load(q[j] + d) * key;
            }
            for (int j = 0; j < queries; j++) product[j][t] = part[j];
        }
        for (int j = 0; j < queries; j++) store(weights[j] + from, sums(product[j]) * scale);
    }
    for (int j = 0; j < queries; j++) rescale[j] = weigh_scores(s, first + j, weights[j], behind, visible, longest);
    for (int from = 0; from < dimension; from += PARTS * LANES) {
        int parts = (dimension - from) / LANES < PARTS ? (dimension - from) / LANES : PARTS;
        vec kept[SHARING][PARTS];
        for (int j = 0; j < queries; j++)
            for (int d = 0; d < parts; d++) kept[j][d] = load(s->sum[first + j] + from + d * LANES) * rescale[j];
        for (int t = 0; t < longest; t++)
            for (int d = 0; d < parts; d++) {
                vec value = get(rows[t] + apart + from + d * LANES);
                for (int j = 0; j < queries; j++) kept[j][d] += weights[j][t] * value;
            }
        for (int j = 0; j < queries; j++)
            for (int d = 0; d < parts; d++) store(s->sum[first + j] + from + d * LANES, kept[j][d]);
    }
}

/* As attend_tokens, for a tile of one row and as many KV heads from `head` on as are computed together. */
INLINE void attend_row(const Attention *a, const int64_t *tile, int64_t head, int64_t together, int64_t from, int64_t to,
                       Softmax *s, int dimension)
{
    int group = (int)(a->heads / a->kv_heads), queries = group * (int)together;
    const int64_t *table = a->tables + tile[3] * a->table_width;
    int64_t apart = a->kv_heads * dimension, size = a->block_tokens;
    float asked[QUERIES + SHARING][WIDEST]; /* what lies beyond is pointed to, and never read */
    for (int j = 0; j < queries; j++) {
        floats(a->q + tile[0] * a->q_stride + (head * group + j) * dimension, asked[j], dimension);
        s->highest[j] = -__builtin_inff();
        s->weight[j] = 0;
        memset(s->sum[j], 0, sizeof(float) * (size_t)dimension);
    }
    for (int64_t base = from; base < to; base += TOKENS) {
        const real *rows[TOKENS];
        ints seen = {0};
        int64_t block = base / size, within = base % size;
        for (int t = 0; t < TOKENS; t++) {
            rows[t] = a->layer + (table[block] * size + within) * 2 * apart + head * dimension;
            if (base + t + 1 < to && ++within == size) within = 0, block++; /* beyond the end: the last, weighed with 0 */
            for (int64_t d = 0; d < together * dimension; d += 32) seen |= widen_halves(rows[t] + d);
            for (int64_t d = 0; d < together * dimension; d += 32) seen |= widen_halves(rows[t] + apart + d);
        }
        __asm__ volatile("" ::"v"(seen)); /* in the order in which they lie, which the processor foresees */
        int64_t left = (tile[2] < to ? tile[2] : to) - base, hidden = tile[2] - a->window - base;
        int visible = left < TOKENS ? (int)left : TOKENS;
        int behind = !a->window || hidden < 0 ? 0 : hidden < TOKENS ? (int)hidden : TOKENS;
        for (int i = 0; i < together; i++) {
            for (int first = i * group; first < (i + 1) * group; first += SHARING) {
                const float *q[SHARING] = {asked[first], asked[first + 1], asked[first + 2], asked[first + 3]};
                switch ((i + 1) * group - first) { /* constants, so that sums stay in registers */
                case 1: attend_rows(q, s, first, 1, behind, visible, rows, apart, dimension, a->scale); break;
                case 2: attend_rows(q, s, first, 2, behind, visible, rows, apart, dimension, a->scale); break;
                case 3: attend_rows(q, s, first, 3, behind, visible, rows, apart, dimension, a->scale); break;
                default: attend_rows(q, s, first, 4, behind, visible, rows, apart, dimension, a->scale);
                }
            }
            for (int t = 0; t < TOKENS; t++) rows[t] += dimension;
        }
    }
}

/* Not inlined: it is long, and once is enough. */
static __attribute__((noinline)) void attend_task_row(const Attention *a, const int64_t *tile, int64_t head,
                                                      int64_t together, int64_t from, int64_t to, Softmax *s)
{
    if (a->dimension == 64)
        attend_row(a, tile, head, together, from, to, s, 64);
    else if (a->dimension == 128)
        attend_row(a, tile, head, together, from, to, s, 128);
    else
        attend_row(a, tile, head, together, from, to, s, (int)a->dimension);
}

/* Whether a row's heads are computed together: then a token's keys and values are read as they lie, in one go. */
static int are_rows(const Attention *a, const int64_t *tiles, int64_t num_tiles)
{
    for (int64_t i = 0; i < num_tiles; i++)
        if (tiles[4 * i + 1] != 1) return 0;
    return a->heads <= QUERIES;
}
