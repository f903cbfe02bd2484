// The operators of one instruction set: the build compiles this file once for each, with INSTRUCTION_SET as its name.
//
// Everything here is in an anonymous namespace: a function that two instruction sets shared would be
// linked in one of their versions, and the other's processors might not have it.
#include "jobs.h"
#include "product.h"
#include "product_int8.h"

#include <math.h>
#include <stdlib.h>

namespace {

float *take_scratch(Scratch &scratch, int64_t size) {
    if (scratch.size < size) {
        free(scratch.data);
        scratch.size = round_up(size, 1024);
        scratch.data = (float *)aligned_alloc(64, (size_t)scratch.size * 4);
        if (!scratch.data) abort();
    }
    return scratch.data;
}

// Tokens of a chunk, for operators that take them one by one.
int64_t tokens_of_chunk(const Step &step, int64_t threads) {
    const int64_t tokens = step.tokens / (threads * 4);
    return tokens < 1 ? 1 : tokens;
}

int64_t token_chunks(const Job &, const Step &step, int64_t threads) {
    const int64_t tokens = tokens_of_chunk(step, threads);
    return (step.tokens + tokens - 1) / tokens;
}

// An operator from a function of one token.
template <void (*of_token)(const Job &, const Step &, int64_t token, Scratch &)>
void compute_tokens(const Job &job, const Step &step, int64_t threads, int64_t chunk, Scratch &scratch) {
    const int64_t tokens = tokens_of_chunk(step, threads), first = chunk * tokens;
    const int64_t last = first + tokens < step.tokens ? first + tokens : step.tokens;
    for (int64_t token = first; token < last; token++) of_token(job, step, token, scratch);
}

float *source_row(const Job &job, const Step &step, int64_t token) {
    return step.buffers[job.source] + token * step.strides[job.source];
}

float *target_row(const Job &job, const Step &step, int64_t token) {
    return step.buffers[job.target] + token * step.strides[job.target];
}

// --- embed -----------------------------------------------------------------------------------------------------------

template <class Element>
void copy_row(const Element *row, float *target, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(target + i, load_wide(row + i));
    for (; i < size; i++) target[i] = widen(row[i]);
}

void embed_token(const Job &job, const Step &step, int64_t token, Scratch &) {
    const int64_t from = step.token_ids[token] * job.inputs;
    if (job.type == BFLOAT16)
        copy_row((const uint16_t *)job.weight + from, target_row(job, step, token), job.inputs);
    else
        copy_row((const float *)job.weight + from, target_row(job, step, token), job.inputs);
}

// --- norm ------------------------------------------------------------------------------------------------------------

// target = x / sqrt(mean(x^2) + eps) * weight; x and target may be the same.
void norm_row(const float *x, const float *weight, int64_t size, double eps, float *target) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float scale = 1.0f / sqrtf(total / (float)size + (float)eps);
    for (i = 0; i + LANES <= size; i += LANES) store(target + i, load(x + i) * broadcast(scale) * load(weight + i));
    for (; i < size; i++) target[i] = x[i] * scale * weight[i];
}

void norm_token(const Job &job, const Step &step, int64_t token, Scratch &) {
    norm_row(source_row(job, step, token), (const float *)job.weight, job.inputs, job.eps, target_row(job, step, token));
}

// --- linear ----------------------------------------------------------------------------------------------------------

// One panel of one row: `values` [PANEL] are sums, bias included. `width` of the columns at `column` exist.
void finish_silu_mul(const float *values, float *target, int64_t width) {
    Vec gate = load(values), up = load(values + LANES);
    float halves[LANES];
    store(halves, gate / (broadcast(1.0f) + exp_of(-gate)) * up);
    memcpy(target, halves, 4 * width);
}

void finish_row(const Job &job, float *values, int64_t panel, float *row) {
    if (job.bias) {
        store(values, load(values) + load(job.bias + panel * PANEL));
        store(values + LANES, load(values + LANES) + load(job.bias + panel * PANEL + LANES));
    }
    const int64_t columns = job.mode == LINEAR_SILU_MUL ? LANES : PANEL, column = panel * columns;
    const int64_t all = job.mode == LINEAR_SILU_MUL ? job.outputs / 2 : job.outputs;
    const int64_t width = all - column < columns ? all - column : columns;
    float *target = row + column;
    if (job.mode == LINEAR_SILU_MUL) {
        finish_silu_mul(values, target, width);
    } else if (job.mode == LINEAR_STORE) {
        memcpy(target, values, 4 * width);
    } else if (width == PANEL) {
        store(target, load(target) + load(values));
        store(target + LANES, load(target + LANES) + load(values + LANES));
    } else {
        for (int64_t i = 0; i < width; i++) target[i] += values[i];
    }
}

template <class Weight>
void linear_panel(const Job &job, const Step &step, int64_t panel, int64_t first, int64_t last) {
    const int64_t inputs = sizeof(Weight) == 2 ? round_up(job.inputs, 2) : job.inputs;
    const Weight *weight = (const Weight *)job.weight + panel * PANEL * inputs;
    const int64_t rows = last - first;
    alignas(64) float values[MAX_ROWS][PANEL];
    for (int64_t group = 0; group < groups_of(rows); group++) {
        const int64_t start = first + group_start(rows, group), end = first + group_start(rows, group + 1);
        const float *x = step.buffers[job.source] + start * step.strides[job.source];
        multiply((int)(end - start), x, step.strides[job.source], weight, job.inputs, values[0], PANEL, false);
        for (int64_t row = start; row < end; row++)
            finish_row(job, values[row - start], panel, step.buffers[job.target] + row * step.strides[job.target]);
    }
}

void linear_int8_panel(const Job &job, const Step &step, int64_t panel, int64_t first, int64_t last) {
    const int64_t panel_words = int8_groups(job.inputs) * (2 + GROUP / 4) * PANEL, rows = last - first;
    const int32_t *weight = (const int32_t *)job.weight + panel * panel_words;
    alignas(64) float values[MAX_INT8_ROWS][PANEL];
    for (int64_t group = 0; group < groups_of(rows, MAX_INT8_ROWS); group++) {
        const int64_t start = first + group_start(rows, group, MAX_INT8_ROWS);
        const int64_t end = first + group_start(rows, group + 1, MAX_INT8_ROWS);
        const float *x = step.buffers[job.source] + start * step.strides[job.source];
        multiply_int8<MAX_INT8_ROWS>((int)(end - start), x, step.strides[job.source], weight, job.inputs,
                                     values[0]);
        for (int64_t row = start; row < end; row++)
            finish_row(job, values[row - start], panel, step.buffers[job.target] + row * step.strides[job.target]);
    }
}

// A chunk is some panels and a block of rows, so few that their inputs stay in the cache while panels pass by.
struct LinearChunks {
    int64_t blocks, panels, width;  // of rows; in all; in a chunk

    LinearChunks(const Job &job, const Step &step, int64_t threads) {
        const int64_t cached_rows = 8 * MAX_ROWS;
        blocks = (step.tokens + cached_rows - 1) / cached_rows;
        panels = (job.outputs + PANEL - 1) / PANEL;
        width = panels / (threads * 8);
        width = width < 1 || blocks > 1 ? 1 : width > 8 ? 8 : width;
    }
    int64_t in_block() const { return (panels + width - 1) / width; }
};

int64_t linear_chunks(const Job &job, const Step &step, int64_t threads) {
    const LinearChunks chunks(job, step, threads);
    return chunks.in_block() * chunks.blocks;
}

void linear(const Job &job, const Step &step, int64_t threads, int64_t chunk, Scratch &) {
    const LinearChunks chunks(job, step, threads);
    const int64_t block = chunk / chunks.in_block(), first = chunk % chunks.in_block() * chunks.width;
    const int64_t last = first + chunks.width < chunks.panels ? first + chunks.width : chunks.panels;
    const int64_t top = step.tokens * block / chunks.blocks, bottom = step.tokens * (block + 1) / chunks.blocks;
    for (int64_t panel = first; panel < last; panel++)
        if (job.type == INT8)
            linear_int8_panel(job, step, panel, top, bottom);
        else if (job.type == BFLOAT16)
            linear_panel<uint16_t>(job, step, panel, top, bottom);
        else
            linear_panel<float>(job, step, panel, top, bottom);
}

void quantize_token(const Job &job, const Step &step, int64_t token, Scratch &) {
    quantize_row(source_row(job, step, token), job.inputs, target_row(job, step, token));
}

// --- rotate and write KV ---------------------------------------------------------------------------------------------

// The sine's first half is negated: each half is a product with the cosine and one with the other half and the sine.
void rotate_half(float *head, const float *half, const float *other, const float *cos, const float *sin, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(head + i, load(half + i) * load(cos + i) + load(other + i) * load(sin + i));
    for (; i < size; i++) head[i] = half[i] * cos[i] + other[i] * sin[i];
}

void rotate_head(float *head, const float *cos, const float *sin, int64_t size, float *copy) {
    const int64_t half = size / 2;
    memcpy(copy, head, 4 * size);
    rotate_half(head, copy, copy + half, cos, sin, half);
    rotate_half(head + half, copy + half, copy, cos + half, sin + half, half);
}

void write_head(const float *head, const Job &job, void *cache, int64_t at) {
    if (job.type == FLOAT32) {
        memcpy((float *)cache + at, head, 4 * job.head_dim);
        return;
    }
    uint16_t *target = (uint16_t *)cache + at;
    int64_t i = 0;
    for (; i + LANES <= job.head_dim; i += LANES) store_narrow(target + i, load(head + i));
    for (; i < job.head_dim; i++) target[i] = narrow(head[i]);
}

void rotate_write_token(const Job &job, const Step &step, int64_t token, Scratch &scratch) {
    float *head = source_row(job, step, token), *copy = take_scratch(scratch, job.head_dim);
    const int64_t size = job.head_dim, position = step.positions[token];
    const int64_t slot = step.groups[job.group].write_index[token];
    const int64_t block = slot / step.block_size, offset = slot % step.block_size;
    for (int64_t i = 0; i < job.heads + 2 * job.kv_heads; i++, head += size) {
        const float *weight = i < job.heads ? job.query_norm : job.key_norm;
        const int64_t key = i - job.heads, value = key - job.kv_heads;
        if (value < 0) {
            if (weight) norm_row(head, weight, size, job.eps, head);
            rotate_head(head, job.cos + position * size, job.sin + position * size, size, copy);
        }
        const int64_t kv_head = value < 0 ? key : value;
        if (kv_head >= 0)
            write_head(head, job, value < 0 ? job.k_cache : job.v_cache,
                       ((block * job.kv_heads + kv_head) * step.block_size + offset) * size);
    }
}

}  // namespace

#include "attention.h"

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)

extern const Operators NAMED(operators_, INSTRUCTION_SET);
const Operators NAMED(operators_, INSTRUCTION_SET) = {
    TEXT_OF(INSTRUCTION_SET),
    LANES,
    {
        {token_chunks, compute_tokens<embed_token>},
        {token_chunks, compute_tokens<norm_token>},
        {linear_chunks, linear},
        {token_chunks, compute_tokens<rotate_write_token>},
        {attend_chunks, attend},
        {token_chunks, compute_tokens<quantize_token>},
    },
};
