// The Python module `flash_csa._C`, on CPython's limited API. Importing it loads the shared object,
// whose static initialisers register the ops; it also shows Python the tables that C++ owns: the
// records, the signatures of the ops, and the sizes of schedules and workspaces.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/params.h"
#include "core/records.h"
#include "core/schedule.h"
#include "cpu/simd.h"
#include "ops/signatures.h"

namespace flash_csa {
namespace {

constexpr const char* kElements[] = {"E2M1", "E4M3"};
constexpr const char* kScaleKinds[] = {"E4M3", "UE8M0", "FP32"};
constexpr const char* kPageOrders[] = {"token-major", "page-split"};
constexpr const char* kLayouts[] = {"packed", "rows", "aligned rows", "dense", "pages"};
constexpr const char* kWorkspaceOps[] = {"attend", "index_scores", "select", "index_select",
                                         "compress"};

PyObject* records_table() {
    PyObject* list = PyList_New(0);
    for (int32_t id = 0; list != nullptr && id < kNumRecords; ++id) {
        const Record r = record(static_cast<RecordId>(id));
        PyObject* row =
            Py_BuildValue("{s:i,s:s,s:s,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:i}", "id", id, "name", r.name,
                          "element", kElements[static_cast<int>(r.element)], "scale_kind",
                          kScaleKinds[static_cast<int>(r.scale_kind)], "page_order",
                          kPageOrders[static_cast<int>(r.order)], "dims", r.dims, "coded_dims",
                          r.coded_dims, "group", r.group, "data_bytes", r.data_bytes, "scale_bytes",
                          r.scale_bytes, "page_align", r.page_align);
        if (row == nullptr || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

PyObject* signatures_table() {
    PyObject* dict = PyDict_New();
    for (const ops::OpSignature& s : ops::kSignatures) {
        PyObject* args = PyList_New(0);
        for (int32_t i = 0; args != nullptr && i < s.count; ++i) {
            const ops::ArgSignature& a = s.args[i];
            PyObject* row =
                Py_BuildValue("(ssssN)", a.label, a.dtypes, a.shape,
                              kLayouts[static_cast<int>(a.layout)], PyBool_FromLong(a.written));
            if (row == nullptr || PyList_Append(args, row) < 0) Py_CLEAR(args);
            Py_XDECREF(row);
        }
        if (args == nullptr || PyDict_SetItemString(dict, s.op, args) < 0) Py_CLEAR(dict);
        Py_XDECREF(args);
        if (dict == nullptr) break;
    }
    return dict;
}

PyObject* py_schedule_size(PyObject*, PyObject* args) {
    int num_sms = 0, rows = 0;
    if (!PyArg_ParseTuple(args, "ii:schedule_size", &num_sms, &rows)) return nullptr;
    return PyLong_FromLong(schedule_size(num_sms, rows));
}

PyObject* py_workspace_bytes(PyObject*, PyObject* args) {
    const char* op = nullptr;
    long long rows, heads, k, max_entries, pool_blocks, num_sms;
    if (!PyArg_ParseTuple(args, "sLLLLLL:workspace_bytes", &op, &rows, &heads, &k, &max_entries,
                          &pool_blocks, &num_sms))
        return nullptr;
    for (int i = 0; i < static_cast<int>(sizeof(kWorkspaceOps) / sizeof(kWorkspaceOps[0])); ++i)
        if (std::strcmp(op, kWorkspaceOps[i]) == 0)
            return PyLong_FromLongLong(workspace_bytes(static_cast<WorkspaceOp>(i), rows, heads, k,
                                                       max_entries, pool_blocks, num_sms));
    return PyErr_Format(PyExc_ValueError,
                        "flash_csa.workspace_bytes: op must be one of attend, index_scores, "
                        "select, index_select, compress, got %s",
                        op);
}

PyObject* py_cpu_level(PyObject*, PyObject*) {
    return PyUnicode_FromString(cpu::kLevelNames[static_cast<int>(cpu::current_level)]);
}

PyObject* py_set_cpu_level(PyObject*, PyObject* args) {
    const char* name = nullptr;
    if (!PyArg_ParseTuple(args, "s:set_cpu_level", &name)) return nullptr;
    for (int i = 0; i <= static_cast<int>(cpu::best_level()); ++i) {
        if (std::strcmp(name, cpu::kLevelNames[i]) != 0) continue;
        cpu::current_level = static_cast<cpu::Level>(i);
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError,
                        "flash_csa.set_cpu_level: level must be one this processor has (at best "
                        "%s), got %s",
                        cpu::kLevelNames[static_cast<int>(cpu::best_level())], name);
}

// False, with a Python error set, where FLASH_CSA_CPU_LEVEL names no level.
bool check_wanted_level() {
    const char* wanted = std::getenv("FLASH_CSA_CPU_LEVEL");
    if (wanted == nullptr || *wanted == '\0') return true;
    std::string names;
    for (const char* name : cpu::kLevelNames) {
        if (std::strcmp(wanted, name) == 0) return true;
        names += (names.empty() ? "" : ", ") + std::string(name);
    }
    PyErr_Format(PyExc_ValueError, "flash_csa: FLASH_CSA_CPU_LEVEL must be one of %s, got %s",
                 names.c_str(), wanted);
    return false;
}

PyMethodDef methods[] = {
    {"schedule_size", py_schedule_size, METH_VARARGS, "schedule_size(num_sms, rows) -> words"},
    {"workspace_bytes", py_workspace_bytes, METH_VARARGS,
     "workspace_bytes(op, rows, heads, k, max_entries, pool_blocks, num_sms) -> bytes"},
    {"cpu_level", py_cpu_level, METH_NOARGS, "cpu_level() -> instruction level in use"},
    {"set_cpu_level", py_set_cpu_level, METH_VARARGS, "set_cpu_level(name): for tests"},
    {nullptr, nullptr, 0, nullptr}};

int add(PyObject* module, const char* name, PyObject* value) {
    if (value == nullptr) return -1;
    const int rc = PyModule_AddObjectRef(module, name, value);
    Py_DECREF(value);
    return rc;
}

int exec_module(PyObject* module) {
    if (!check_wanted_level()) return -1;
#ifdef USE_CUDA
    PyObject* const has_cuda = PyBool_FromLong(1);
#else
    PyObject* const has_cuda = PyBool_FromLong(0);
#endif
    if (add(module, "HAS_CUDA", has_cuda) < 0 || add(module, "RECORDS", records_table()) < 0 ||
        add(module, "SIGNATURES", signatures_table()) < 0 ||
        PyModule_AddIntConstant(module, "HEAD_DIM", kHeadDim) < 0 ||
        PyModule_AddIntConstant(module, "ROPE_DIMS", kRopeDims) < 0 ||
        PyModule_AddIntConstant(module, "INDEX_DIM", kIndexDim) < 0 ||
        PyModule_AddIntConstant(module, "POOL_BLOCK", kPoolBlock) < 0 ||
        PyModule_AddIntConstant(module, "MAX_PAGE_SIZE", kMaxPageSize) < 0 ||
        PyModule_AddIntConstant(module, "SYNC_BYTES", kSyncBytes) < 0 ||
        PyModule_AddIntConstant(module, "ATTEND_TILE", kAttendTile) < 0 ||
        PyModule_AddIntConstant(module, "INDEX_TILE", kIndexTile) < 0 ||
        PyModule_AddIntConstant(module, "SCHEDULE_TILE_WORD",
                                offsetof(ScheduleHeader, tile) / sizeof(int32_t)) < 0 ||
        PyModule_AddIntConstant(module, "MAX_TOP_K", ops::kMaxTopK) < 0 ||
        PyModule_AddIntConstant(module, "MAX_POOL_BLOCKS", ops::kMaxPoolBlocks) < 0 ||
        PyModule_AddIntConstant(module, "MAX_INDEX_HEADS", ops::kMaxIndexHeads) < 0 ||
        PyModule_AddIntConstant(module, "MAX_WORKERS", ops::kMaxWorkers) < 0 ||
        PyModule_AddIntConstant(module, "MUTANT", 0) < 0)  // tests/mutants: the fault built in
        return -1;
    return 0;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec_module)}, {0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace flash_csa

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&flash_csa::module_def); }
