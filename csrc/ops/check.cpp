#include "ops/check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "core/schedule.h"

namespace flash_csa::ops {
namespace {

constexpr int64_t kAlign = 16;  // bytes: the widest vector load, and what a bulk copy wants

struct Dtype {
    const char* shorthand;
    const char* name;
    ScalarType type;
    int64_t bytes;
};
constexpr Dtype kDtypes[] = {
    {"bf16", "bfloat16", ScalarType::BFloat16, 2},
    {"f32", "float32", ScalarType::Float, 4},
    {"i32", "int32", ScalarType::Int, 4},
    {"u8", "uint8", ScalarType::Byte, 1},
};

// Calls f(piece) for every piece of `text` between separators.
template <class F>
void split(const char* text, char separator, const F& f) {
    const char* begin = text;
    for (const char* c = text;; ++c) {
        if (*c != separator && *c != '\0') continue;
        f(std::string_view(begin, static_cast<size_t>(c - begin)));
        if (*c == '\0') return;
        begin = c + 1;
    }
}

// Calls f(dtype) for every dtype that "bf16|f32" names.
template <class F>
void for_each_dtype(const char* dtypes, const F& f) {
    split(dtypes, '|', [&](std::string_view shorthand) {
        for (const Dtype& d : kDtypes)
            if (shorthand == d.shorthand) f(d);
    });
}

bool allows(const char* dtypes, ScalarType type) {
    bool ok = false;
    for_each_dtype(dtypes, [&](const Dtype& d) { ok = ok || d.type == type; });
    return ok;
}

std::string dtype_names(const char* dtypes) {
    std::string names;
    for_each_dtype(dtypes, [&](const Dtype& d) {
        names += (names.empty() ? "" : " or ") + std::string(d.name);
    });
    return names;
}

std::string dtype_name(ScalarType type) {
    for (const Dtype& d : kDtypes)
        if (d.type == type) return d.name;
    switch (type) {
        case ScalarType::Long:
            return "int64";
        case ScalarType::Short:
            return "int16";
        case ScalarType::Char:
            return "int8";
        case ScalarType::Half:
            return "float16";
        case ScalarType::Double:
            return "float64";
        case ScalarType::Bool:
            return "bool";
        case ScalarType::Float8_e4m3fn:
            return "float8_e4m3fn (its bytes: .view(torch.uint8))";
        case ScalarType::Float8_e8m0fnu:
            return "float8_e8m0fnu (its bytes: .view(torch.uint8))";
        case ScalarType::Float4_e2m1fn_x2:
            return "float4_e2m1fn_x2 (its bytes: .view(torch.uint8))";
        default:
            return "dtype " + std::to_string(static_cast<int>(type));
    }
}

struct LayoutRule {
    int64_t free_dims;  // leading dimensions whose stride is free; the others are packed
    bool aligned;       // free strides and the base are multiples of kAlign
    const char* wanted;
};
constexpr LayoutRule kLayoutRules[] = {
    {0, false, "contiguous"},
    {1, false, "contiguous in every dimension but the first"},
    {1, true, "contiguous in every dimension but the first, its stride a multiple of 16 bytes"},
    {8, true, "contiguous in the last dimension, other strides multiples of 16 bytes"},
    {8, true, "contiguous in the last dimension, its page stride a multiple of 16 bytes"},
};

std::string join_sizes(torch::headeronly::IntHeaderOnlyArrayRef values) {
    std::string out = "[";
    for (size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + std::to_string(values[i]);
    return out + "]";
}

std::string device_name(bool cuda, int32_t index) {
    return cuda ? "cuda:" + std::to_string(index) : "cpu";
}

int64_t element_bytes(ScalarType type) {
    for (const Dtype& d : kDtypes)
        if (d.type == type) return d.bytes;
    return 0;
}

// Whether no two elements lie at one address.
bool is_distinct(const Tensor& t) {
    std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
    for (int64_t d = 0; d < t.dim(); ++d)
        if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
    std::sort(dims.begin(), dims.end());
    int64_t extent = 1;  // of the dimensions so far
    for (const auto& [stride, size] : dims) {
        if (stride < extent) return false;
        extent += stride * (size - 1);
    }
    return true;
}

}  // namespace

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", x);
    return text;
}

Check::Check(const char* op) : op_(nullptr) {
    for (const OpSignature& s : kSignatures)
        if (std::strcmp(s.op, op) == 0) op_ = &s;
    if (op_ == nullptr) throw std::logic_error(std::string("no signature for op ") + op);
    symbols_.reserve(8);
}

void Check::fail(const std::string& what) const {
    throw std::invalid_argument(std::string("flash_csa.") + op_->op + ": " + what);
}

// Ops check their arguments about in the order of the table.
const ArgSignature& Check::find(const char* label) {
    for (int32_t i = 0; i < op_->count; ++i) {
        const int32_t at = (next_ + i) % op_->count;
        if (std::strcmp(op_->args[at].label, label) != 0) continue;
        next_ = at + 1;
        return op_->args[at];
    }
    throw std::logic_error(std::string("no signature for ") + op_->op + " " + label);
}

const Check::Symbol* Check::lookup(std::string_view name) const {
    for (const Symbol& s : symbols_)
        if (s.name == name) return &s;
    return nullptr;
}

void Check::bind(std::string_view symbol, int64_t value) { symbols_.push_back({symbol, value}); }

int64_t Check::operator[](std::string_view symbol) const {
    const Symbol* s = lookup(symbol);
    return s == nullptr ? 0 : s->value;
}

// Binds symbols of a failing shape, too.
bool Check::match_shape(const char* shape, const Tensor& t) {
    int64_t dim = 0;
    bool ok = true;
    split(shape, ' ', [&](std::string_view token) {
        if (dim >= t.dim()) {
            ok = false;
            return;
        }
        int64_t got = t.size(dim++);
        if (token == "*") return;
        if (token[0] >= '0' && token[0] <= '9') {
            ok = ok && got == std::stoll(std::string(token));
            return;
        }
        if (token.size() > 2 && token.substr(token.size() - 2) == "+1") {
            token.remove_suffix(2);
            got -= 1;
        }
        if (const Symbol* s = lookup(token))
            ok = ok && got == s->value;
        else if (got >= 0)
            symbols_.push_back({token, got});
        else
            ok = false;
    });
    return ok && dim == t.dim();
}

// The shape with its known sizes; a free one is shown as given, or by name where the rank is wrong.
std::string Check::expected_shape(const char* shape, const Tensor* t) const {
    const int64_t rank = 1 + std::count(shape, shape + std::strlen(shape), ' ');
    std::string out = "[";
    int64_t dim = 0;
    split(shape, ' ', [&](std::string_view token) {
        if (dim > 0) out += ", ";
        const bool plus = token.size() > 2 && token.substr(token.size() - 2) == "+1";
        if (const Symbol* s = lookup(plus ? token.substr(0, token.size() - 2) : token))
            out += std::to_string(s->value + plus);
        else if (t != nullptr && rank == t->dim() && (token[0] < '0' || token[0] > '9'))
            out += std::to_string(t->size(dim));
        else
            out += token;
        ++dim;
    });
    return out + "]";
}

void Check::operator()(const char* label, const Tensor& t) {
    const ArgSignature& arg = find(label);
    const size_t known = symbols_.size();
    const bool given = t.defined();  // None for a tensor that is no optional comes as undefined
    if (!given || !allows(arg.dtypes, t.scalar_type()) || !match_shape(arg.shape, t)) {
        symbols_.erase(symbols_.begin() + static_cast<std::ptrdiff_t>(known), symbols_.end());
        fail(std::string(label) + " must be " + dtype_names(arg.dtypes) + " " +
             expected_shape(arg.shape, given ? &t : nullptr) + ", got " +
             (given ? dtype_name(t.scalar_type()) + " " + join_sizes(t.sizes()) : "None"));
    }
    const bool cuda = t.is_cuda();
    const int32_t device = cuda ? t.get_device_index() : -1;
    if (!any_) {
        any_ = true;
        cuda_ = cuda;
        device_ = device;
    }
    if ((!cuda && !t.is_cpu()) || cuda != cuda_ || device != device_)
        fail(std::string(label) + " must be on " + device_name(cuda_, device_) + ", got " +
             (cuda || t.is_cpu() ? device_name(cuda, device) : "another device"));
    check_layout(arg, t);
}

void Check::check_layout(const ArgSignature& arg, const Tensor& t) const {
    if (t.numel() == 0) return;
    const LayoutRule& rule = kLayoutRules[static_cast<int>(arg.layout)];
    const int64_t dims = t.dim(), bytes = element_bytes(t.scalar_type());
    const int64_t align = rule.aligned ? kAlign : bytes;
    const int64_t free_dims = std::min<int64_t>(rule.free_dims, dims - 1);  // leading ones
    bool ok = true;
    int64_t packed = 1;  // the stride that this dimension has in a packed tensor
    for (int64_t d = dims - 1; d >= 0; --d) {
        if (t.size(d) > 1)
            ok = ok && (d < free_dims ? t.stride(d) * bytes % align == 0 : t.stride(d) == packed);
        packed *= t.size(d);
    }
    if (!ok)
        fail(std::string(arg.label) + " must be " + rule.wanted + ", got strides " +
             join_sizes(t.strides()));
    if (arg.written && !is_distinct(t))
        fail(std::string(arg.label) + " must not overlap itself (it is written), got strides " +
             join_sizes(t.strides()));
    check_alignment(arg.label, t, align);
}

void Check::check_alignment(const char* label, const Tensor& t, int64_t align) const {
    const uintptr_t past = reinterpret_cast<uintptr_t>(t.data_ptr()) % align;
    if (past != 0)
        fail(std::string(label) + " must start at a multiple of " + std::to_string(align) +
             " bytes, got an address " + std::to_string(past) + " past one");
}

void Check::one_of(const char* argument, int64_t got, std::initializer_list<int64_t> values) const {
    std::string list;
    for (int64_t v : values) {
        if (v == got) return;
        list += (list.empty() ? "" : ", ") + std::to_string(v);
    }
    fail(std::string(argument) + " must be one of " + list + ", got " + std::to_string(got));
}

void Check::in_range(const std::string& argument, int64_t got, int64_t low, int64_t high) const {
    if (got < low || got > high)
        fail(argument + " must be in [" + std::to_string(low) + ", " + std::to_string(high) +
             "], got " + std::to_string(got));
}

void Check::not_negative(const char* argument, double got) const {
    if (!(got >= 0 && std::isfinite(static_cast<float>(got))))
        fail(std::string(argument) + " must be finite in FP32 and not negative, got " +
             number(got));
}

void Check::workspace(const OptTensor& t, int64_t needed) const {
    const int64_t got = t.has_value() ? t->numel() : 0;
    if (got < needed)
        fail("workspace must hold at least " + std::to_string(needed) + " bytes, got " +
             std::to_string(got));
    if (got > 0) check_alignment("workspace", *t, kAlign);
}

void Check::schedule(const Tensor& t, int64_t rows) {
    (*this)("schedule", t);
    const int64_t least = schedule_size(1, static_cast<int32_t>(rows));
    if (t.size(0) < least)
        fail("schedule must have at least " + std::to_string(least) + " words for " +
             std::to_string(rows) + " rows, got " + std::to_string(t.size(0)));
}

RecordId Check::record_id(const std::string& argument, int64_t id,
                          std::initializer_list<RecordId> allowed) const {
    for (RecordId a : allowed)
        if (id == static_cast<int64_t>(a)) return a;
    std::string names;
    for (RecordId a : allowed) names += (names.empty() ? "" : ", ") + std::string(record(a).name);
    fail(argument + " must be one of " + names + ", got " +
         (id >= 0 && id < kNumRecords ? record(static_cast<RecordId>(id)).name
                                      : "record id " + std::to_string(id)));
}

Pages Check::pages(const char* label, const Tensor& t, int64_t id, int64_t page_size,
                   std::initializer_list<RecordId> allowed) {
    (*this)(label, t);
    const std::string buffer(label);
    const std::string argument = buffer.substr(0, buffer.find('.'));  // "main" of "main.pages"
    const Record r = record(record_id(argument + ".record", id, allowed));
    in_range(argument + ".page_size", page_size, 1, kMaxPageSize);
    const int64_t payload = r.payload(static_cast<int32_t>(page_size));
    if (t.size(1) < payload)
        fail(buffer + " must have pages of at least " + std::to_string(payload) + " bytes (" +
             std::to_string(page_size) + " " + r.name + " records), got " +
             std::to_string(t.size(1)));
    if (t.size(0) * page_size > std::numeric_limits<int32_t>::max())
        fail(buffer + " must hold at most 2147483647 slots, got " +
             std::to_string(t.size(0) * page_size));
    return {ptr<uint8_t>(t), t.stride(0), t.size(0), static_cast<int32_t>(page_size),
            static_cast<RecordId>(id)};
}

BatchView batch_view(Check& check, const Tensor& positions, const Tensor& row_request,
                     const Tensor& cu_tokens, const Tensor& start, const Tensor& tail_slot,
                     int64_t max_rows) {
    check("batch.positions", positions);
    check("batch.row_request", row_request);
    check("batch.cu_tokens", cu_tokens);
    check("batch.start", start);
    check("batch.tail_slot", tail_slot);
    check.in_range("batch.max_rows", max_rows, 0, std::numeric_limits<int32_t>::max());
    return {ptr<const int32_t>(positions),       ptr<const int32_t>(row_request),
            ptr<const int32_t>(cu_tokens),       ptr<const int32_t>(start),
            ptr<const int32_t>(tail_slot),       static_cast<int32_t>(positions.size(0)),
            static_cast<int32_t>(start.size(0)), static_cast<int32_t>(max_rows)};
}

}  // namespace flash_csa::ops
