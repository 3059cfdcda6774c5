// A team of threads that run one function together and meet at barriers.
//
// The caller is thread 0. Helpers are started when they are first wanted, spin for the next job for about a
// tenth of a millisecond, then sleep. Waiting threads give their processor away after some spins: beside a
// foreign process two spinning threads would otherwise stop each other.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <immintrin.h>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <thread>

namespace team {

constexpr int MAX_THREADS = 64;
constexpr int SPINS = 3000;
constexpr int YIELDS = 100;

// Spins until `ready()`, then yields; false after `yields` of them (never, if that is negative).
template <class Ready> bool spin(Ready ready, int yields) {
    for (int i = 0; i < SPINS; i++) {
        if (ready()) return true;
        _mm_pause();
    }
    for (int i = 0; i != yields; i++) {
        if (ready()) return true;
        sched_yield();
    }
    return ready();
}

using Work = void (*)(void *job, int thread, int threads);

class Team {
  public:
    // Runs `work` on `threads` threads; returns when all are done. One job at a time.
    void run(Work work, void *job, int threads) {
        std::lock_guard<std::mutex> lock(busy);
        if (threads > MAX_THREADS) threads = MAX_THREADS;
        while (helpers + 1 < threads) {
            int index = ++helpers;
            uint64_t seen = number.load();
            std::thread([this, index, seen] { help(index, seen); }).detach();
        }
        this->work = work, this->job = job, this->threads = threads;
        arrived.store(0);
        acknowledged.store(0);
        {
            std::lock_guard<std::mutex> sleep(sleeping);
            number.fetch_add(1);
        }
        if (helpers) awake.notify_all();
        work(job, 0, threads);
        // Every helper, also one without a part in this job, has seen it: it may be replaced.
        spin([this] { return acknowledged.load() == helpers; }, -1);
    }

    // Waits until all threads of the job are here. The counter only grows within a job.
    void meet() {
        if (threads == 1) return;
        uint64_t mine = arrived.fetch_add(1) + 1;
        uint64_t all = (mine + threads - 1) / threads * threads;
        spin([this, all] { return arrived.load(std::memory_order_acquire) >= all; }, -1);
    }

  private:
    void help(int index, uint64_t seen) {
        for (;;) {
            auto there = [this, seen] { return number.load() != seen; };
            if (!spin(there, YIELDS)) {
                std::unique_lock<std::mutex> sleep(sleeping);
                awake.wait(sleep, there);
            }
            seen++;
            if (index < threads) work(job, index, threads);
            acknowledged.fetch_add(1);
        }
    }

    std::mutex busy, sleeping;
    std::condition_variable awake;
    std::atomic<uint64_t> number{0}, arrived{0};
    std::atomic<int> acknowledged{0};
    int helpers = 0, threads = 1;
    Work work = nullptr;
    void *job = nullptr;
};

// The process's team; never freed, since its helpers run until the process ends.
inline Team *&current() {
    static Team *team = [] {
        pthread_atfork(nullptr, nullptr, [] { current() = new Team; }); // a child has no helpers
        return new Team;
    }();
    return team;
}

} // namespace team
