/* Whole decoder layers in one call: between its products a layer's own calls would cost a single stream a quarter of its
 * time. They are the same functions in the same order, so the results are the same bits.
 */

typedef struct {
    const uint8_t *blocks; /* interleaved */
    const real *bias;      /* may be null */
    int64_t kind, out_width;
} Product;

typedef struct {
    Product qkv, attention_out, gate_up, down;
    const real *qkv_norm, *gate_up_norm; /* [hidden] */
    const real *qk_norm;                 /* [2, D]; may be null */
    int64_t window;                      /* 0 for none */
} Layer;

typedef struct {
    const float *turns;
    const int64_t *positions, *kv_rows, *tables, *tiles;
    int64_t rows, table_width, num_tiles, shares, window_shares, block_tokens;
    int64_t hidden, heads, kv_heads, dimension, vnni;
    float epsilon, scale;
} Step;

static void multiply_by(const Product *product, real *out, const real *x, const real *residual, int64_t in_width,
                        const Step *step, Quantised *room)
{
    multiply_quantised(out, x, product->blocks, residual, step->rows, in_width, product->out_width, (Kind)product->kind,
                       (int)step->vnni, room);
    if (!product->bias) return;
    for (int64_t row = 0; row < step->rows; row++)
        for (int64_t i = 0; i < product->out_width; i += LANES) {
            real *at = out + row * product->out_width + i;
            put(at, get(at) + get(product->bias + i));
        }
}

/* x [rows, hidden] through `count` layers, in place. `caches`: a layer's memory each.
 * Returns 0, or 1 when there is no memory for what lies between. */
int sluice_layers(real *x, const Layer *layers, real *const *caches, int64_t count, const Step *step)
{
    int64_t rows = step->rows, hidden = step->hidden, q_width = step->heads * step->dimension, failed = 0;
    int64_t qkv_width = q_width + 2 * step->kv_heads * step->dimension, wide = 0;
    for (int64_t i = 0; i < count; i++) wide = layers[i].gate_up.out_width > wide ? layers[i].gate_up.out_width : wide;
    int64_t widest = hidden > q_width ? hidden : q_width;
    if (wide / 2 > widest) widest = wide / 2;
    Quantised *room = malloc(sizeof(Quantised) * (size_t)(rows * widest / BLOCK));
    real *narrow = malloc(sizeof(real) * (size_t)(rows * (widest + (qkv_width > wide ? qkv_width : wide))));
    real *products = narrow + rows * widest; /* of qkv, then of gate and up */
    if (!room || !narrow) failed = 1;
    for (int64_t i = 0; i < count && !failed; i++) {
        const Layer *layer = layers + i;
        sluice_norm(narrow, x, layer->qkv_norm, rows, hidden, step->epsilon);
        multiply_by(&layer->qkv, products, narrow, 0, hidden, step, room);
        sluice_turn_and_store(products, step->turns, step->positions, caches[i], step->kv_rows, rows, step->heads,
                              step->kv_heads, step->dimension, layer->qk_norm, step->epsilon);
        failed = sluice_attend(narrow, products, qkv_width, caches[i], step->tables, step->table_width, step->tiles,
                               step->num_tiles, step->block_tokens, step->heads, step->kv_heads, step->dimension,
                               step->scale, layer->window ? step->window_shares : step->shares, layer->window);
        multiply_by(&layer->attention_out, x, narrow, x, q_width, step, room);
        sluice_norm(narrow, x, layer->gate_up_norm, rows, hidden, step->epsilon);
        multiply_by(&layer->gate_up, products, narrow, 0, hidden, step, room);
        sluice_silu_mul(narrow, products, rows, layer->gate_up.out_width / 2);
        multiply_by(&layer->down, x, narrow, x, layer->gate_up.out_width / 2, step, room);
    }
    free(room);
    free(narrow);
    return (int)failed;
}
