#include "team.h"

#include <stdlib.h>
#include <time.h>

namespace {

constexpr int64_t SPIN_NS = 50000;

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int threads) : threads_(threads), scratch_(threads, Scratch{nullptr, 0}) {
    for (int index = 1; index < threads; index++) others_.emplace_back([this, index] { work(index); });
}

Team::~Team() {
    ending_ = true;
    publish(behind_ + 1);
    for (std::thread &other : others_) other.join();
    for (Scratch &scratch : scratch_) free(scratch.data);
}

void Team::run(const Operators &operators, const Job *jobs, int64_t count, const Step &step) {
    operators_ = &operators;
    jobs_ = jobs;
    step_ = &step;
    first_ = behind_ + 1;
    behind_ = first_ + (uint64_t)count;
    publish(first_);
    for (uint64_t now = first_; now < behind_;) {
        int64_t chunk;
        if (take(&now, &chunk))
            compute(now, chunk, 0);
        else if (now < behind_)
            wait_behind(now);
    }
}

void Team::work(int index) {
    while (!ending_) {
        uint64_t now;
        int64_t chunk;
        if (take(&now, &chunk))
            compute(now, chunk, index);
        else
            wait_behind(now);
    }
}

// Takes a chunk of the job under way, and tells its number in any case.
bool Team::take(uint64_t *number, int64_t *chunk) {
    uint64_t state = state_.load();
    for (;;) {
        *number = state >> CHUNK_BITS;
        *chunk = (int64_t)(state & CHUNK_MASK);
        if (*chunk >= chunks_[*number & 1].load()) return false;
        if (state_.compare_exchange_weak(state, state + 1)) return true;
    }
}

// Whoever computes the last chunk of a job begins the next one.
void Team::compute(uint64_t number, int64_t chunk, int index) {
    const Job &job = jobs_[number - first_];
    const int64_t chunks = chunks_[number & 1];
    operators_->of[job.kind].compute(job, *step_, threads_, chunk, scratch_[index]);
    if (done_.fetch_add(1) + 1 < chunks) return;
    done_ = 0;
    publish(number + 1);
}

// Begins the job of this number, or the pause behind the last. Numbers go up one by one: see `chunks_`.
void Team::publish(uint64_t number) {
    for (int64_t chunks = 0; chunks == 0; number++) {
        const bool is_job = number >= first_ && number < behind_;
        if (is_job) chunks = operators_->of[jobs_[number - first_].kind].chunks(jobs_[number - first_], *step_, threads_);
        chunks_[number & 1] = chunks;
        // Sequentially consistent on both sides: either a sleeper sees the new number or this sees the sleeper.
        state_ = number << CHUNK_BITS;
        if (!is_job) break;
    }
    if (sleepers_ == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
}

// Waits until the job under way has another number.
void Team::wait_behind(uint64_t old) {
    const int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (number() != old) return;
            pause_briefly();
        }
    } while (now_ns() < end);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return number() != old; });
    sleepers_.fetch_sub(1);
}
