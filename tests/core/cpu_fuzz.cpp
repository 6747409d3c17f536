// The CPU back end on hostile values, under AddressSanitizer and UBSan: every buffer is a heap
// block of exactly its size, so that one byte read or written outside is an error. Shapes are as
// the ops check them; positions, requests, tables, slots, lengths and pools are anything.
//
// usage: cpu_fuzz [rounds]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/numerics.h"
#include "core/schedule.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

using namespace flash_csa;

namespace {

std::mt19937 rng(1);
std::vector<std::shared_ptr<void>> kept;  // buffers of the round

int32_t below(int32_t n) { return static_cast<int32_t>(rng() % static_cast<uint32_t>(n)); }

template <class T>
T* buffer(int64_t n) {
    std::shared_ptr<T> p(new T[static_cast<size_t>(n)], std::default_delete<T[]>());
    auto* bytes = reinterpret_cast<uint8_t*>(p.get());
    for (size_t i = 0; i < static_cast<size_t>(n) * sizeof(T); ++i)
        bytes[i] = static_cast<uint8_t>(rng());
    kept.push_back(p);
    return p.get();
}

// Mostly in [low, high), sometimes far outside.
int32_t hostile(int32_t low, int32_t high) {
    constexpr int32_t kOutside[] = {INT32_MAX, INT32_MIN, -1, -2, INT32_MAX - 1, 1 << 30};
    return below(5) == 0 ? kOutside[below(6)] : low + below(high - low + 2) - 1;
}

int32_t* hostile_ints(int64_t n, int32_t low, int32_t high) {
    int32_t* p = buffer<int32_t>(n);
    for (int64_t i = 0; i < n; ++i) p[i] = hostile(low, high);
    return p;
}

template <class T>
Matrix<T> matrix(int64_t rows, int64_t columns) {
    return {buffer<std::remove_const_t<T>>(rows * columns), columns};
}
Matrix<int32_t> ints(int64_t rows, int64_t columns, int32_t low, int32_t high) {
    return {hostile_ints(rows * columns, low, high), columns};
}
template <class T>
Matrix<const T> constant(const Matrix<T>& m) {
    return {m.data, m.stride};
}

struct Scene {
    int32_t rows = below(40);
    int32_t requests = 1 + below(4);
    int32_t page_size = 1 + below(70);
    int32_t num_pages = below(9);
    int32_t columns = below(6);  // of block tables
    int32_t positions = 1 + below(600);
    int32_t ratio = std::vector<int32_t>{1, 2, 4, 128}[static_cast<size_t>(below(4))];
    bool strict = below(2) == 0;

    // Half of the scenes are well-formed batches, so that the deep paths run too.
    BatchView batch() {
        BatchView b;
        int32_t* position = hostile_ints(rows, -1, positions);
        int32_t* request = hostile_ints(rows, 0, requests);
        int32_t* cu = hostile_ints(requests + 1, 0, rows);
        int32_t* start = hostile_ints(requests, 0, positions);
        if (below(2) == 0) {
            for (int32_t r = 0; r <= requests; ++r)
                cu[r] = static_cast<int32_t>(int64_t{rows} * r / requests);
            for (int32_t r = 0; r < requests; ++r) {
                start[r] = below(positions);
                for (int32_t t = cu[r]; t < cu[r + 1]; ++t) {
                    position[t] = start[r] + t - cu[r];
                    request[t] = r;
                }
            }
        }
        b.positions = position;
        b.row_request = request;
        b.cu_tokens = cu;
        b.start = start;
        b.tail_slot = hostile_ints(requests, 0, 3);
        b.rows = rows;
        b.requests = requests;
        b.max_rows = rows;
        return b;
    }
    Pages pages(RecordId id) {
        Pages p;
        const int64_t payload = record(id).payload(page_size);
        const int64_t padding = below(2) * 48;
        p.page_stride = (payload + 15) / 16 * 16 + padding;
        // The last page ends with its payload: nothing behind it belongs to the buffer.
        const int64_t bytes = num_pages > 0 ? (num_pages - 1) * p.page_stride + payload : 0;
        p.data = buffer<uint8_t>(bytes);
        p.num_pages = num_pages;
        p.page_size = page_size;
        p.record = id;
        return p;
    }
    static ConstPages constant_pages(const Pages& p) {
        return {p.data, p.page_stride, p.num_pages, p.page_size, p.record};
    }
    BlockTable table(int32_t wide) {
        return {hostile_ints(int64_t{requests} * wide, 0, num_pages + 1), wide, requests, wide};
    }
    CosSin cos_sin() {
        float* data = buffer<float>(int64_t{positions} * kRopeDims);
        for (int64_t i = 0; i < int64_t{positions} * kRopeDims; ++i) data[i] = below(100) * 0.01f;
        return {data, positions};
    }
    RecordId attended() {
        constexpr RecordId ids[] = {RecordId::MainFp4, RecordId::WindowFp8, RecordId::MixedFp8};
        return ids[below(3)];
    }
};

void fuzz_store(Scene& s) {
    const RecordId id = static_cast<RecordId>(below(kNumRecords));
    const Pages pages = s.pages(id);
    const int32_t dims = record(id).dims;
    const int32_t* slots = hostile_ints(s.rows, 0, s.num_pages * s.page_size);
    cpu::store({constant(matrix<uint16_t>(s.rows, dims)), pages, slots, s.rows});
    LoadParams load{Scene::constant_pages(pages), slots, s.rows, {}, {}};
    load.out_f32 = matrix<float>(s.rows, dims);
    cpu::load(load);
}

void fuzz_rope_store(Scene& s) {
    RopeStoreParams p;
    p.heads = 1 + below(3);
    p.rows = s.rows;
    p.q = {buffer<uint16_t>(int64_t{s.rows} * p.heads * kHeadDim), int64_t{p.heads} * kHeadDim,
           kHeadDim};
    p.kv = constant(matrix<uint16_t>(s.rows, kHeadDim));
    p.window = s.pages(below(2) == 0 ? RecordId::WindowFp8 : RecordId::MixedFp8);
    p.slots = hostile_ints(s.rows, 0, s.num_pages * s.page_size);
    p.positions = hostile_ints(s.rows, 0, s.positions);
    p.cos_sin = s.cos_sin();
    p.q_norm = below(2) == 0;
    p.q_norm_eps = 1e-6f;
    cpu::rope_store(p);
}

void fuzz_quantize_query(Scene& s) {
    QuantizeQueryParams p;
    p.rows = s.rows;
    p.heads = 1 + below(9);
    p.q = {buffer<uint16_t>(int64_t{s.rows} * p.heads * kIndexDim), int64_t{p.heads} * kIndexDim,
           kIndexDim};
    p.positions = hostile_ints(s.rows, 0, s.positions);
    p.cos_sin = s.cos_sin();
    p.record = below(2) == 0 ? RecordId::IndexFp4 : RecordId::IndexFp8;
    p.rotate = below(2) == 0;
    p.codes = matrix<uint8_t>(s.rows, int64_t{p.heads} * record(p.record).data_bytes);
    p.scales_ue8m0 = matrix<int32_t>(s.rows, p.heads);
    p.scales_f32 = matrix<float>(s.rows, p.heads);
    cpu::quantize_query(p);
}

void fuzz_compress(Scene& s) {
    CompressParams p;
    p.ratio = s.ratio;
    p.dim = s.ratio > 1 && below(3) == 0 ? kIndexDim : kHeadDim;
    p.overlap = s.ratio == 4;
    const int32_t width = p.overlap ? 2 * p.dim : p.dim;
    if (s.ratio == 1) {
        p.kv_bf16 = constant(matrix<uint16_t>(s.rows, width));
    } else {
        p.kv = constant(matrix<float>(s.rows, width));
        p.gate = constant(matrix<float>(s.rows, width));
        if (below(2) == 0) p.bias = constant(matrix<float>(s.ratio, width));
    }
    p.batch = s.batch();
    p.entry_slots = hostile_ints(s.rows, 0, s.num_pages * s.page_size);
    if (below(2) == 0) p.entry_first = hostile_ints(s.requests, 0, 9);
    p.norm_weight = buffer<float>(p.dim);
    p.cos_sin = s.cos_sin();
    if (below(3) > 0) {
        const int32_t ring = 2 * s.ratio + below(5);
        p.tail = {buffer<float>(int64_t{3} * 2 * ring * width), int64_t{2} * ring * width, 3, ring,
                  width};
    }
    if (p.dim == kHeadDim) {
        p.main = s.pages(s.attended());
        p.key_weight = constant(matrix<uint16_t>(kIndexDim, kHeadDim));
        p.key_norm_weight = buffer<float>(kIndexDim);
    }
    p.index = s.pages(below(2) == 0 ? RecordId::IndexFp4 : RecordId::IndexFp8);
    p.rotate = below(2) == 0;
    if (below(2) == 0) p.latent_out = matrix<uint16_t>(s.rows, p.dim);
    cpu::compress(p);
}

PoolView pool_of(Scene& s, int32_t width) {
    PoolView pool;
    pool.width = width;
    pool.blocks = constant(ints(s.rows, width, 0, 60));
    pool.counts = hostile_ints(s.rows, 0, width);
    return pool;
}

SelectionOut selection_of(Scene& s, int32_t k) {
    return {matrix<int32_t>(s.rows, k), matrix<int32_t>(s.rows, k), buffer<int32_t>(s.rows),
            matrix<float>(s.rows, k)};
}

PoolOut pool_out_of(Scene& s, int32_t width) {
    return {matrix<int32_t>(s.rows, width), buffer<int32_t>(s.rows), matrix<float>(s.rows, width),
            width};
}

void fuzz_index(Scene& s) {
    IndexScoresParams p;
    p.query.heads = 1 + below(40);
    const bool fp4_query = below(3) > 0;
    const RecordId key = fp4_query && below(2) == 0 ? RecordId::IndexFp4 : RecordId::IndexFp8;
    const int32_t row = record(fp4_query ? RecordId::IndexFp4 : RecordId::IndexFp8).data_bytes;
    p.query.codes = constant(matrix<uint8_t>(s.rows, int64_t{p.query.heads} * row));
    if (fp4_query)
        p.query.scales_ue8m0 = constant(matrix<int32_t>(s.rows, p.query.heads));
    else
        p.query.scales_f32 = constant(matrix<float>(s.rows, p.query.heads));
    p.index = Scene::constant_pages(s.pages(key));
    p.weights.f32 = constant(matrix<float>(s.rows, p.query.heads));
    p.batch = s.batch();
    p.block_table = s.table(s.columns);
    p.ratio = s.ratio;
    p.strict = s.strict;
    if (below(2) == 0) p.pool = pool_of(s, 1 + below(6));
    p.columns = p.pool.width > 0 ? p.pool.width * kPoolBlock : int64_t{s.columns} * s.page_size;
    p.out = matrix<float>(s.rows, p.columns);
    cpu::index_scores(p);

    SelectParams q;
    q.scores = constant(p.out);
    q.columns = p.columns;
    q.batch = p.batch;
    q.block_table = p.block_table;
    q.k = 1 + below(70);
    q.ratio = s.ratio;
    q.page_size = s.page_size;
    q.strict = s.strict;
    q.pool = p.pool;
    q.out = selection_of(s, q.k);
    if (p.pool.width == 0) q.pool_out = pool_out_of(s, 1 + below(9));
    cpu::select(q);
    cpu::index_select({p, q});
}

void fuzz_pools(Scene& s) {
    NormalizePoolParams n;
    n.n = 1 + below(20);
    n.blocks = constant(ints(s.rows, n.n, 0, 30));
    n.positions = hostile_ints(s.rows, 0, s.positions);
    n.rows = s.rows;
    n.ratio = s.ratio;
    n.max_entries = below(400);
    n.strict = s.strict;
    n.out = pool_out_of(s, n.n + below(3));
    cpu::normalize_pool(n);

    const int32_t parts = 1 + below(4), k_in = 1 + below(20);
    MergeSelectionsParams m;
    m.positions = ints(int64_t{parts} * s.rows, k_in, 0, s.positions).data;
    m.scores = matrix<float>(int64_t{parts} * s.rows, k_in).data;
    m.parts = parts;
    m.rows = s.rows;
    m.k_in = k_in;
    m.k = 1 + below(30);
    m.row_request = hostile_ints(s.rows, 0, s.requests);
    m.block_table = s.table(s.columns);
    m.page_size = s.page_size;
    m.out = selection_of(s, m.k);
    cpu::merge_selections(m);

    MergePoolsParams b;
    b.blocks = ints(int64_t{parts} * s.rows, k_in, 0, 40).data;
    b.scores = matrix<float>(int64_t{parts} * s.rows, k_in).data;
    b.parts = parts;
    b.rows = s.rows;
    b.n = k_in;
    b.positions = hostile_ints(s.rows, 0, s.positions);
    b.ratio = s.ratio;
    b.strict = s.strict;
    b.out = pool_out_of(s, 1 + below(20));
    cpu::merge_pools(b);
}

template <class Params>
void set_outputs(Params& p, int32_t rows, int32_t heads) {
    const int64_t values = int64_t{rows} * heads * kHeadDim;
    if (below(2) == 0)
        p.out_f32 = {buffer<float>(values), int64_t{heads} * kHeadDim, kHeadDim};
    else
        p.out_bf16 = {buffer<uint16_t>(values), int64_t{heads} * kHeadDim, kHeadDim};
    p.lse = matrix<float>(rows, heads);
}

RecordList list_of(Scene& s, int32_t columns) {
    RecordList list;
    list.pages = Scene::constant_pages(s.pages(s.attended()));
    list.slots = constant(ints(s.rows, columns, 0, s.num_pages * s.page_size));
    list.lengths = hostile_ints(s.rows, 0, columns);
    list.columns = columns;
    return list;
}

void fuzz_attend(Scene& s) {
    AttendParams p;
    p.rows = s.rows < 8 ? s.rows : 8;
    p.heads = 1 + below(20);
    s.rows = p.rows;
    p.q = {buffer<uint16_t>(int64_t{p.rows} * p.heads * kHeadDim), int64_t{p.heads} * kHeadDim,
           kHeadDim};
    p.window = list_of(s, below(140));
    if (below(2) == 0) {
        p.main = list_of(s, below(90));
    } else {
        p.main.pages = Scene::constant_pages(s.pages(s.attended()));
        p.contiguous = s.table(s.columns);
        p.contiguous_request = hostile_ints(s.rows, 0, s.requests);
        p.contiguous_n_vis = hostile_ints(s.rows, 0, s.columns * s.page_size);
    }
    if (below(2) == 0) p.sink = buffer<float>(p.heads);
    p.softmax_scale = 0.044194174f;
    if (below(2) == 0) {
        p.derotate_positions = hostile_ints(s.rows, 0, s.positions);
        p.derotate = s.cos_sin();
    }
    set_outputs(p, p.rows, p.heads);
    cpu::attend(p);

    MergeParams m;
    m.parts = 1 + below(3);
    m.rows = p.rows;
    m.heads = p.heads;
    m.outs_f32 = buffer<float>(int64_t{m.parts} * m.rows * m.heads * kHeadDim);
    m.lses = buffer<float>(int64_t{m.parts} * m.rows * m.heads);
    m.derotate_positions = p.derotate_positions;
    m.derotate = p.derotate;
    set_outputs(m, m.rows, m.heads);
    cpu::merge(m);
}

void fuzz_step(Scene& s) {
    StepSlotsParams p;
    p.batch = s.batch();
    p.num_ratios = below(4);
    for (int32_t i = 0; i < p.num_ratios; ++i) {
        p.ratios[i] = 1 << i;
        p.page_sizes[i] = 1 + below(70);
        p.block_tables[i] = s.table(below(6));
    }
    p.window = 1 + below(130);
    p.window_page_size = s.page_size;
    p.window_table = s.table(below(6));
    p.strict = s.strict;
    if (below(2) == 0) p.window_first = hostile_ints(s.requests, 0, s.positions);
    if (below(2) == 0) p.entry_first = constant(ints(p.num_ratios, s.requests, 0, 50));
    p.window_store = buffer<int32_t>(s.rows);
    p.window_slots = matrix<int32_t>(s.rows, p.window);
    p.window_lengths = buffer<int32_t>(s.rows);
    p.entry_slots = matrix<int32_t>(p.num_ratios, s.rows);
    p.n_vis = matrix<int32_t>(p.num_ratios, s.rows);
    cpu::step_slots(p);

    ScheduleParams q;
    q.batch = p.batch;
    q.num_ratios = p.num_ratios;
    for (int32_t i = 0; i < q.num_ratios; ++i) {
        q.ratios[i] = p.ratios[i];
        q.max_entries[i] = below(5000);
        q.contiguous[i] = below(3) == 0;
    }
    q.k = below(600);
    q.heads = 1 + below(130);
    q.index_heads = 32;
    q.window_first = p.window_first;
    q.pool_blocks = below(30);
    q.pool_ratio = 1;
    q.strict = s.strict;
    q.batch_invariant = below(2) == 0;
    q.num_sms = 1 + below(140);
    q.size = schedule_size(q.num_sms, s.rows);
    q.out = matrix<int32_t>(num_sections(q.num_ratios), q.size);
    cpu::schedule(q);
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
    for (int round = 0; round < rounds; ++round) {
        rng.seed(static_cast<uint32_t>(round));
        cpu::current_level =
            static_cast<cpu::Level>(round % (1 + static_cast<int>(cpu::best_level())));
        for (auto* fuzz : {fuzz_store, fuzz_rope_store, fuzz_quantize_query, fuzz_compress,
                           fuzz_index, fuzz_pools, fuzz_attend, fuzz_step}) {
            Scene scene;
            fuzz(scene);
            kept.clear();
        }
    }
    std::printf("%d rounds\n", rounds);
}
