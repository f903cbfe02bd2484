// What travels between Python and the operators: plain structs of 8-byte fields (engine/cpu_ops/abi.py mirrors them).
#pragma once
#include <stdint.h>

enum JobKind : int64_t { JOB_EMBED, JOB_NORM, JOB_LINEAR, JOB_ROTATE_WRITE, JOB_ATTEND, JOB_QUANTIZE, JOB_KINDS };
enum ElementType : int64_t { FLOAT32, BFLOAT16, INT8 };
enum LinearMode : int64_t { LINEAR_STORE, LINEAR_ADD, LINEAR_SILU_MUL };

// One operator over all tokens of a step. Buffers are named by index; the fields that an operator does not name are 0.
struct Job {
    int64_t kind, source, target;
    int64_t type;              // of the weight, of the embedding or of the KV cache
    const void *weight;        // packed (linear), rows (embed), float32 [size] (norm)
    const float *bias;         // float32, in the packed order, or null
    int64_t outputs, inputs;   // linear: columns of target before SiLU-mul halves them, and of source; norm: inputs
    int64_t mode;              // of a linear
    double eps;
    const float *cos, *sin;    // float32 [positions, head_dim]; the sine's first half is negated
    const float *query_norm, *key_norm;  // float32 [head_dim] or null
    void *k_cache, *v_cache;   // [blocks, kv_heads, block_size, head_dim]
    int64_t group, heads, kv_heads, head_dim;
    int64_t window;            // tokens that a position sees, 0: all
    double scale;
};

struct Group {
    const int64_t *write_index;   // [tokens]: block * block_size + offset
    const int32_t *block_tables;  // [rows, table_stride]
    int64_t table_stride;
};

enum { MAX_BUFFERS = 8, QUERY_TOKENS = 16 };

// Tokens [first, last) of one row, at most QUERY_TOKENS: what attention takes at a time.
struct Queries {
    int64_t row, first, last;
};

// The tokens of a step, as engine/attention/base.py describes them, and where its activations are: float32 rows.
struct Step {
    int64_t tokens, rows, block_size;
    const int64_t *token_ids, *positions;
    const int32_t *query_starts, *kv_lens;
    const Group *groups;
    float *buffers[MAX_BUFFERS];
    int64_t strides[MAX_BUFFERS];
    const Queries *queries;   // made by the engine's side of the call (run.cpp)
    int64_t query_count;
};

// Memory of one thread; it grows and is kept.
struct Scratch {
    float *data;
    int64_t size;
};

// An operator cuts a job into chunks, which any threads compute in any order: what goes where changes nothing in the
// results.
struct Operator {
    int64_t (*chunks)(const Job &, const Step &, int64_t threads);
    void (*compute)(const Job &, const Step &, int64_t threads, int64_t chunk, Scratch &);
};

// What one instruction set brings: its name, floats in a vector, and an operator for each kind of job.
struct Operators {
    const char *name;
    int64_t lanes;
    Operator of[JOB_KINDS];
};
