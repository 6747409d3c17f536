// schedule: deals the rows of a step out to workers, in one launch.
//
//   in   batch, ratios and capacities              out  one section per block
//
// A block takes a section: one pass sums the rows' tiles, a second scans them and writes borders.
// All arithmetic is core/schedule.h's, so the words equal the CPU's. Latency binds.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "core/schedule.h"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kThreads = 512;
using Sum = cub::BlockReduce<long long, kThreads>;
using Scan = cub::BlockScan<long long, kThreads>;

struct Shared {
    union {
        Sum::TempStorage sum;
        Scan::TempStorage scan;
    };
    long long total;
    int32_t with_work;
};

// Tiles and rows with work of the section, in all threads.
__device__ void count(const ScheduleParams& p, int32_t section, Shared& shared) {
    long long tiles = 0, with_work = 0;
    for (int32_t row = threadIdx.x; row < p.batch.rows; row += kThreads) {
        const int32_t own = row_tiles(p, section, row);
        tiles += own;
        with_work += own > 0;
    }
    tiles = Sum(shared.sum).Sum(tiles);
    __syncthreads();
    with_work = Sum(shared.sum).Sum(with_work);
    if (threadIdx.x == 0) {
        shared.total = tiles;
        shared.with_work = static_cast<int32_t>(with_work);
    }
    __syncthreads();
}

__global__ void __launch_bounds__(kThreads) schedule_kernel(ScheduleParams p) {
    __shared__ Shared shared;
    const int32_t index = blockIdx.x;
    count(p, index, shared);
    const Section<int32_t> section{p.out.row(index)};
    ScheduleHeader header = plan_section(p, index, shared.total, shared.with_work);
    int32_t* partials = section.partials(p.num_sms);
    long long before_chunk = 0, partials_before = 0;
    for (int32_t first = 0; first < p.batch.rows; first += kThreads) {
        const int32_t row = first + static_cast<int32_t>(threadIdx.x);
        const int32_t tiles = row < p.batch.rows ? row_tiles(p, index, row) : 0;
        long long before, chunk, partial, partial_chunk;
        Scan(shared.scan).ExclusiveSum(tiles, before, chunk);
        __syncthreads();
        before += before_chunk;
        const int32_t own = row_partials(header, before, tiles);
        Scan(shared.scan).ExclusiveSum(own, partial, partial_chunk);
        __syncthreads();
        if (row < p.batch.rows) {
            partials[row] = static_cast<int32_t>(partials_before + partial);
            write_row(section, header, row, before, tiles);
        }
        before_chunk += chunk;
        partials_before += partial_chunk;
    }
    if (threadIdx.x != 0) return;
    header.partials = static_cast<int32_t>(partials_before);
    partials[p.batch.rows] = header.partials;
    write_ends(section, header, p.batch.rows, shared.total);
    *reinterpret_cast<ScheduleHeader*>(section.words) = header;
}

}  // namespace

cudaError_t schedule(const ScheduleParams& p, cudaStream_t stream) {
    return launch(schedule_kernel, dim3(num_sections(p.num_ratios)), kThreads, 0, stream, p);
}

}  // namespace flash_csa::sm90
