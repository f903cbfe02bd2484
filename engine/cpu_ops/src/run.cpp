// The C interface: which instruction set this processor has, and the one call that runs a list of jobs.
#include "team.h"

#include <string.h>
#include <unistd.h>

// Those that were not compiled are null.
#if defined(__x86_64__)
extern const Operators operators_avx512vnni __attribute__((weak));
extern const Operators operators_avx512 __attribute__((weak));
extern const Operators operators_avx2 __attribute__((weak));
#endif
extern const Operators operators_generic;

namespace {

// The sets that are here and that this processor has, best first.
std::vector<const Operators *> usable() {
    std::vector<const Operators *> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (&operators_avx512vnni && avx512 && __builtin_cpu_supports("avx512vnni")) sets.push_back(&operators_avx512vnni);
    if (&operators_avx512 && avx512) sets.push_back(&operators_avx512);
    if (&operators_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        sets.push_back(&operators_avx2);
#endif
    sets.push_back(&operators_generic);
    return sets;
}

// One team for the process: callers take turns. A forked child has none of its parent's threads and starts anew.
std::mutex turn;
Team *team = nullptr;
pid_t owner = 0;
const Operators *operators = usable().front();

Team &team_of(int threads) {
    if (team && (owner != getpid() || team->threads() != threads)) {
        if (owner == getpid()) delete team;
        team = nullptr;
    }
    if (!team) {
        team = new Team(threads);
        owner = getpid();
    }
    return *team;
}

std::vector<Queries> queries_of(const Step &step) {
    std::vector<Queries> queries;
    for (int64_t row = 0; row < step.rows; row++)
        for (int64_t first = step.query_starts[row]; first < step.query_starts[row + 1]; first += QUERY_TOKENS) {
            const int64_t last = first + QUERY_TOKENS, end = step.query_starts[row + 1];
            queries.push_back({row, first, last < end ? last : end});
        }
    return queries;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// Sizes of the structs, to compare with the other side's.
EXPORTED int64_t headrace_job_bytes() { return sizeof(Job); }
EXPORTED int64_t headrace_step_bytes() { return sizeof(Step); }

EXPORTED const char *headrace_instruction_set() { return operators->name; }
EXPORTED int64_t headrace_lanes() { return operators->lanes; }

// Choose another set than the best; returns 0 where this processor does not have it. Not while jobs run.
EXPORTED int64_t headrace_use(const char *name) {
    for (const Operators *one : usable())
        if (strcmp(one->name, name) == 0) {
            operators = one;
            return 1;
        }
    return 0;
}

EXPORTED void headrace_run(const Job *jobs, int64_t count, Step *step, int64_t threads) {
    std::lock_guard<std::mutex> lock(turn);
    std::vector<Queries> queries = queries_of(*step);
    step->queries = queries.data();
    step->query_count = (int64_t)queries.size();
    team_of((int)threads).run(*operators, jobs, count, *step);
}
}
