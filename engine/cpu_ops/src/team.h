// A team of threads that runs a list of jobs one after the other, each cut into chunks.
//
// A job is done when its chunks are, not when all threads have been there: one whose core another process has taken is
// not waited for unless it holds a chunk. Whoever finds nothing to take spins for SPIN_NS and then sleeps, so a team that
// is idle leaves the cores to others.
#pragma once
#include "jobs.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Team {
  public:
    explicit Team(int threads);
    ~Team();
    int threads() const { return threads_; }
    // Runs all jobs and returns when they are done; the caller is one of the threads.
    void run(const Operators &operators, const Job *jobs, int64_t count, const Step &step);

  private:
    bool take(uint64_t *number, int64_t *chunk);
    void compute(uint64_t number, int64_t chunk, int index);
    void publish(uint64_t number);
    void wait_behind(uint64_t number);
    uint64_t number() const { return state_.load() >> CHUNK_BITS; }
    void work(int index);

    // Every job ever run has a number. Its chunks are taken by counting up the low bits beside it, which fails once the
    // number is another one: so a thread that comes late touches nothing of jobs that are over.
    static constexpr int CHUNK_BITS = 24;
    static constexpr uint64_t CHUNK_MASK = (1 << CHUNK_BITS) - 1;
    alignas(64) std::atomic<uint64_t> state_{0};
    // Chunks of the job with an even or odd number. It is written anew when the next but one begins, and by then whoever
    // has read it for the old one fails to take.
    std::atomic<int64_t> chunks_[2] = {{0}, {0}};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> ending_{false};
    std::mutex mutex_;
    std::condition_variable changed_;

    // Of the list that runs. They change only between lists, when nobody holds a chunk.
    const Operators *operators_ = nullptr;
    const Job *jobs_ = nullptr;
    const Step *step_ = nullptr;
    uint64_t first_ = 0, behind_ = 0;  // numbers of its jobs: [first, behind); `behind` is then the pause's

    const int threads_;
    std::vector<Scratch> scratch_;
    std::vector<std::thread> others_;
};
