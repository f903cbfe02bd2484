// Causal attention over the paged cache: a softmax that is carried on from one tile of keys to the next.
//
// Tiles are KEY_TILE keys at absolute multiples of KEY_TILE. Every score is one chain of sums over the head's dimensions
// and every output one chain over its keys, in order; a key that a token does not see adds exactly 0. So a token's result
// is the same whether it is decoded, or prefilled with others, in chunks or behind a cached prefix. Keys that no token
// of the tile sees are not read: they may hold anything.
#pragma once
#include "jobs.h"
#include "product.h"
#include "transpose.h"

#include <math.h>

namespace {

constexpr int KEY_TILE = 64;

// Where the keys and values of positions [first, last) of a tile are. The vectors at both ends are filled up with keys
// of the tile, whose scores are not looked at.
template <class Element>
struct KeyTile {
    const Element *keys[KEY_TILE];
    const Element *values[KEY_TILE];

    KeyTile(const Job &job, int64_t block_size, const int32_t *table, int64_t kv_head, int64_t start, int64_t first,
            int64_t last) {
        for (int64_t key = first; key < last;) {
            const int64_t position = start + key, offset = position % block_size;
            const int64_t left = block_size - offset, end = key + left < last ? key + left : last;
            int64_t at = ((table[position / block_size] * job.kv_heads + kv_head) * block_size + offset) * job.head_dim;
            for (; key < end; key++, at += job.head_dim) {
                keys[key] = (const Element *)job.k_cache + at;
                values[key] = (const Element *)job.v_cache + at;
            }
        }
        for (int64_t key = first / LANES * LANES; key < first; key++) keys[key] = keys[first];
        for (int64_t key = last; key % LANES; key++) keys[key] = keys[first];
    }

    // Blocks lie anywhere in memory, so the processor does not see them coming.
    void prefetch(int64_t first, int64_t last, int64_t size) const {
        for (int64_t key = first; key < last; key++)
            for (int64_t at = 0; at < size * (int64_t)sizeof(Element); at += 64) {
                __builtin_prefetch((const char *)keys[key] + at, 0, 2);
                __builtin_prefetch((const char *)values[key] + at, 0, 2);
            }
    }
};

// What one item (some tokens of a row, one KV head) works with. Rows of queries are (token, head of the group).
struct Attending {
    int64_t rows, group, size, padded_size;  // of heads; padded to whole panels
    int64_t position, window;                // of the first token
    float *queries, *scores, *sums, *output_max, *output_total, *keys, *values;
    int64_t query_stride;

    Attending(const Job &job, int64_t tokens, int64_t first_position, Scratch &scratch) {
        group = job.heads / job.kv_heads;
        rows = tokens * group;
        size = job.head_dim;
        padded_size = round_up(size, PANEL);
        query_stride = round_up(size, LANES) + LANES;
        position = first_position;
        window = job.window;
        const int64_t most = QUERY_TOKENS * group;
        float *at = take_scratch(scratch, most * (query_stride + KEY_TILE + padded_size + 2 * LANES) +
                                              KEY_TILE * (round_up(size, LANES) + padded_size) + 2 * LANES);
        queries = at, at += most * query_stride;
        scores = at, at += most * KEY_TILE;
        sums = at, at += most * padded_size;
        output_max = at, at += round_up(most, LANES);
        output_total = at, at += round_up(most, LANES);
        keys = at, at += KEY_TILE * round_up(size, LANES);
        values = at;
    }

    int64_t position_of(int64_t row) const { return position + row / group; }
    int64_t seen_from(int64_t of) const { return window && of >= window ? of - window + 1 : 0; }
};

void begin(Attending &a, const Job &job, const float *query, int64_t stride) {
    const Vec scale = broadcast((float)job.scale);
    for (int64_t row = 0; row < a.rows; row++) {
        const float *from = query + row / a.group * stride + row % a.group * a.size;
        float *to = a.queries + row * a.query_stride;
        int64_t i = 0;
        for (; i + LANES <= a.size; i += LANES) store(to + i, load(from + i) * scale);
        for (; i < a.size; i++) to[i] = from[i] * (float)job.scale;
        a.output_max[row] = -INFINITY;
        a.output_total[row] = 0;
    }
    memset(a.sums, 0, (size_t)(a.rows * a.padded_size) * 4);
}

// Makes panels of the tile's keys, as a packed weight has them: bfloat16 stays in pairs.
template <class Element>
void lay_out_keys(const Attending &a, const KeyTile<Element> &tile, int64_t first, int64_t last) {
    const int64_t words = a.size * (int64_t)sizeof(Element) / 4;
    for (int64_t left = first / LANES * LANES; left < last; left += LANES) {
        float *columns = a.keys + left / PANEL * words * PANEL + left % PANEL;
        const float *rows[LANES];
        for (int j = 0; j < LANES; j++) rows[j] = (const float *)tile.keys[left + j];
        int64_t i = 0;
        for (; i + LANES <= words; i += LANES) {
            transpose_block(rows, columns + i * PANEL, PANEL);
            for (int j = 0; j < LANES; j++) rows[j] += LANES;
        }
        for (int64_t rest = 0; i + rest < words; rest++)
            for (int j = 0; j < LANES; j++) memcpy(columns + (i + rest) * PANEL + j, rows[j] + rest, 4);
    }
}

template <class Element>
void lay_out_values(const Attending &a, const KeyTile<Element> &tile, int64_t first, int64_t last) {
    for (int64_t left = 0; left < a.size; left += LANES) {
        float *panel = a.values + left / PANEL * KEY_TILE * PANEL + left % PANEL;
        const int64_t width = a.size - left < LANES ? a.size - left : LANES;
        for (int64_t key = first; key < last; key++) {
            if (width == LANES) {
                store(panel + key * PANEL, load_wide(tile.values[key] + left));
            } else {
                for (int64_t i = 0; i < LANES; i++)
                    panel[key * PANEL + i] = i < width ? widen(tile.values[key][left + i]) : 0.0f;
            }
        }
    }
    const int64_t end = round_up(a.size, LANES);
    if (end < a.padded_size)
        for (int64_t key = first; key < last; key++)
            store(a.values + end / PANEL * KEY_TILE * PANEL + end % PANEL + key * PANEL, Vec{});
}

// Turns a row's scores into weights relative to the largest score so far, and scales what has been summed to it.
void weigh(Attending &a, int64_t row, int64_t tile_start, int64_t last) {
    float *scores = a.scores + row * KEY_TILE;
    const int64_t position = a.position_of(row), from = a.seen_from(position) - tile_start;
    const int64_t to = position + 1 - tile_start < last ? position + 1 - tile_start : last;
    const int64_t end = round_up(last, LANES);
    for (int64_t i = 0; i < from && i < end; i++) scores[i] = -INFINITY;
    for (int64_t i = to < 0 ? 0 : to; i < end; i++) scores[i] = -INFINITY;
    Vec highest = broadcast(-INFINITY);
    for (int64_t i = 0; i < end; i += LANES) highest = larger(highest, load(scores + i));
    const float here = largest(highest), before = a.output_max[row], most = here > before ? here : before;
    if (most == -INFINITY) {  // nothing seen so far
        memset(scores, 0, (size_t)end * 4);
        return;
    }
    Vec total = {};
    for (int64_t i = 0; i < end; i += LANES) {
        Vec weight = exp_of(load(scores + i) - broadcast(most));
        store(scores + i, weight);
        total = total + weight;
    }
    float added = sum(total);
    if (most != a.output_max[row]) {
        const Vec kept = exp_of(broadcast(a.output_max[row]) - broadcast(most));
        for (int64_t i = 0; i < a.padded_size; i += LANES) {
            float *at = a.sums + row * a.padded_size + i;
            store(at, load(at) * kept);
        }
        a.output_total[row] *= kept[0];
    }
    a.output_total[row] += added;
    a.output_max[row] = most;
}

template <class Element>
void attend_tile(Attending &a, const KeyTile<Element> &tile, int64_t tile_start, int64_t first, int64_t last) {
    lay_out_keys(a, tile, first, last);
    lay_out_values(a, tile, first, last);
    for (int64_t group = 0; group < groups_of(a.rows); group++) {
        const int64_t top = group_start(a.rows, group);
        const int rows = (int)(group_start(a.rows, group + 1) - top);
        for (int64_t panel = first / PANEL; panel * PANEL < last; panel++)
            multiply(rows, a.queries + top * a.query_stride, a.query_stride,
                     (const Element *)a.keys + panel * a.size * PANEL, a.size,
                     a.scores + top * KEY_TILE + panel * PANEL, KEY_TILE, false);
        for (int64_t row = top; row < top + rows; row++) weigh(a, row, tile_start, last);
        for (int64_t panel = 0; panel * PANEL < a.padded_size; panel++)
            multiply(rows, a.scores + top * KEY_TILE + first, KEY_TILE,
                     a.values + (panel * KEY_TILE + first) * PANEL, last - first,
                     a.sums + top * a.padded_size + panel * PANEL, a.padded_size, true);
    }
}

// The tiles of keys that some tokens of a row see, for one KV head: [start, end) of each.
template <class Element>
struct Tiles {
    const Job &job;
    const Step &step;
    const int32_t *table;
    int64_t kv_head, seen_from, seen_to;

    Tiles(const Job &job, const Step &step, int64_t item) : job(job), step(step) {
        const Queries &queries = step.queries[item / job.kv_heads];
        const Group &group = step.groups[job.group];
        table = group.block_tables + queries.row * group.table_stride;
        kv_head = item % job.kv_heads;
        const int64_t behind = step.query_starts[queries.row + 1];
        const int64_t position = step.kv_lens[queries.row] - (behind - queries.first);
        seen_from = job.window && position >= job.window ? position - job.window + 1 : 0;
        seen_to = step.kv_lens[queries.row] - (behind - queries.last);
    }
    int64_t begin() const { return seen_from / KEY_TILE * KEY_TILE; }
    int64_t first(int64_t start) const { return seen_from > start ? seen_from - start : 0; }
    int64_t last(int64_t start) const { return seen_to - start < KEY_TILE ? seen_to - start : KEY_TILE; }
    KeyTile<Element> at(int64_t start) const {
        return KeyTile<Element>(job, step.block_size, table, kv_head, start, first(start), last(start));
    }
    void prefetch(int64_t start) const { at(start).prefetch(first(start), last(start), job.head_dim); }
};

template <class Element>
void attend_item(const Job &job, const Step &step, int64_t item, Scratch &scratch) {
    const Queries &queries = step.queries[item / job.kv_heads];
    const Tiles<Element> tiles(job, step, item);
    Attending a(job, queries.last - queries.first, tiles.seen_to - (queries.last - queries.first), scratch);
    const int64_t head = tiles.kv_head * a.group * a.size;
    begin(a, job, step.buffers[job.source] + queries.first * step.strides[job.source] + head,
          step.strides[job.source]);
    for (int64_t start = tiles.begin(); start < tiles.seen_to; start += KEY_TILE) {
        if (start + KEY_TILE < tiles.seen_to) tiles.prefetch(start + KEY_TILE);
        else if (item >= 2) Tiles<Element>(job, step, item - 2).prefetch(Tiles<Element>(job, step, item - 2).begin());
        attend_tile(a, tiles.at(start), start, tiles.first(start), tiles.last(start));
    }
    for (int64_t row = 0; row < a.rows; row++) {
        float *target = step.buffers[job.target] + (queries.first + row / a.group) * step.strides[job.target] + head +
                        row % a.group * a.size;
        for (int64_t i = 0; i < a.size; i++)
            target[i] = a.sums[row * a.padded_size + i] / a.output_total[row];
    }
}

// A chunk is some tokens of a row for one KV head.
int64_t attend_chunks(const Job &job, const Step &step, int64_t) { return step.query_count * job.kv_heads; }

// The last queries of a prompt see most: they are taken first.
void attend(const Job &job, const Step &step, int64_t threads, int64_t chunk, Scratch &scratch) {
    const int64_t item = attend_chunks(job, step, threads) - 1 - chunk;
    if (job.type == BFLOAT16)
        attend_item<uint16_t>(job, step, item, scratch);
    else
        attend_item<float>(job, step, item, scratch);
}

}  // namespace
