/* The counterparts of the ops in programs compiled by XLA: pairs of custom calls.
 *
 *   post: copies its operands to staging memory, posts, returns the address of a struct posted as an integer
 *   wait: takes that integer, waits, copies the results out
 *   put, finish: the same for the bridge
 *   fact: the counterpart of BaguaHvdFact
 *
 * A call does not receive the shapes and types of its operands, so Python writes them into the call's text: numbers
 * separated by blanks, the operation's name last (bagua_hvd/tensorflow/xla.py). Every call has several results, so
 * that `outs` is always an array.
 */
#include "base/block_pool.h"
#include "tensorflow/completion.h"
#include "tensorflow/op_kernel.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------- XLA's registry, in C++ ---- */

/* XLA's registry of custom calls is found in the loaded TensorFlow by its C++ names. The C++ objects defined by hand here
 * have the layout of libstdc++, with which TensorFlow is built. This is checked before anything is registered: a failure
 * is written, and read back by TensorFlow's own function. */

/* std::string. Up to 15 characters are stored in the object itself. */
#define LOCAL_CAPACITY 15
struct cxx_string {
    char *data;
    size_t size;
    union {
        size_t capacity;
        char local[LOCAL_CAPACITY + 1];
    };
};

/* XlaCustomCallStatus: std::optional<std::string>. */
typedef struct {
    struct cxx_string message;
    bool has_message;
} xla_status;

/* std::optional<absl::string_view>, returned in memory. */
struct optional_view {
    size_t size;
    const char *data;
    bool has_value;
};

/* A custom call with several results (outs) and the text that the graph passes to it, which is not 0-terminated. */
typedef void xla_function(void **outs, const void **ins, const char *text, size_t nchars, xla_status *status);

static const char library[] = "libtensorflow_cc.so.2";
static void *(*registry)(void);
static void (*add)(void *registry, const struct cxx_string *name, void *function, const struct cxx_string *platform);
static struct optional_view (*get_message)(const xla_status *);
static void *(*new)(size_t);

static struct cxx_string borrowed(const char *text)
{
    return (struct cxx_string){ .data = (char *)text, .size = strlen(text), .capacity = strlen(text) };
}

/* Makes the program fail. */
static void xla_fail(xla_status *status, const char *message)
{
    if (status->has_message)
        return;
    struct cxx_string *string = &status->message;
    string->size = strlen(message);
    string->data = string->local;
    if (string->size > LOCAL_CAPACITY) {
        string->data = new(string->size + 1);
        string->capacity = string->size;
    }
    memcpy(string->data, message, string->size + 1);
    status->has_message = true;
}

static bool failure_is_understood(const char *message)
{
    xla_status status = { 0 };
    xla_fail(&status, message);
    struct optional_view read = get_message(&status);
    bool same = read.has_value && read.size == strlen(message) && memcmp(read.data, message, read.size) == 0;
    if (status.message.data != status.message.local) {
        void (*delete)(void *) = (void (*)(void *))tf_api_symbol("libstdc++.so.6", "_ZdlPv");
        delete(status.message.data);
    }
    return same;
}

static const char *load_registry(void)
{
    *(void **)&registry = tf_api_symbol(library, "_ZN3xla24CustomCallTargetRegistry6GlobalEv");
    *(void **)&add = tf_api_symbol(
        library, "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPvS8_");
    *(void **)&get_message = tf_api_symbol(library, "_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_");
    *(void **)&new = tf_api_symbol("libstdc++.so.6", "_Znwm");
    if (!registry || !add)
        return "xla::CustomCallTargetRegistry";
    if (!get_message || !new || !failure_is_understood("short") || !failure_is_understood("longer than a local string"))
        return "XlaCustomCallStatus";
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------- text ---- */

/* The text of a call, 0-terminated, and the position of the parser. */
struct text {
    char *begin, *next;
};

static struct text text_open(const char *chars, size_t nchars)
{
    char *begin = malloc(nchars + 1);
    memcpy(begin, chars, nchars);
    begin[nchars] = 0;
    return (struct text){ begin, begin };
}

static int64_t text_int(struct text *text) { return strtoll(text->next, &text->next, 10); }

/* Reads the bits as an integer: strtod() depends on the program's locale, which may have a decimal comma. */
static double text_float(struct text *text)
{
    const int64_t bits = text_int(text);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The text after the last number and one blank. */
static const char *text_rest(const struct text *text) { return *text->next ? text->next + 1 : text->next; }

/* dtype ndim dims bytes; returns the bytes. dims: of KERNEL_MAX_NDIM; a tensor with more is rejected when posted. */
static size_t text_tensor(struct text *text, struct bhvd_tensor *tensor, int64_t *dims)
{
    tensor->dtype = (int32_t)text_int(text);
    tensor->ndim = (int32_t)text_int(text);
    tensor->shape = dims;
    for (int i = 0; i < tensor->ndim; i++) {
        const int64_t dim = text_int(text);
        if (i < KERNEL_MAX_NDIM)
            dims[i] = dim;
    }
    if (tensor->ndim > KERNEL_MAX_NDIM)
        tensor->ndim = -1;
    return (size_t)text_int(text);
}

/* ------------------------------------------------------------------------------------------------- collectives ---- */

/* Memory for tensors during communication: XLA may reuse its own once a call has returned. Up to 1 GiB is kept for the next run. */
static struct block_pool pool = BLOCK_POOL((size_t)1 << 30);

static void *staging_acquire(size_t nbytes) { return block_pool_acquire(&pool, nbytes); }
static void staging_release(void *block) { block_pool_release(&pool, block); }

/* A posted operation, until its wait call. */
struct posted {
    bhvd_handle *handle;
    size_t count;               /* 0: a barrier, whose result is the handle's value */
    struct operand {
        void *src, *dst;        /* staging memory; equal: in place; dst NULL: the core allocates */
        size_t nbytes;          /* of the result */
    } blocks[];
};

#define ROWS_DIFFER \
    "the ranks' first dimensions differ, but a function compiled by XLA has results of fixed shapes: use jit_compile=False"

static void posted_free(struct posted *posted)
{
    for (size_t i = 0; i < posted->count; i++) {
        if (posted->blocks[i].dst && posted->blocks[i].dst != posted->blocks[i].src)
            staging_release(posted->blocks[i].dst);
        staging_release(posted->blocks[i].src);
    }
    free(posted);
}

static void post(void **outs, const void **ins, const char *chars, size_t nchars, xla_status *status)
{
    struct text text = text_open(chars, nchars);
    struct bhvd_error error;
    struct bhvd_args args = { .device = -1 };
    args.kind = (int32_t)text_int(&text);
    args.process_set = (int32_t)text_int(&text);
    args.op = (int32_t)text_int(&text);
    args.root_rank = (int32_t)text_int(&text);
    args.prescale_factor = text_float(&text);
    args.postscale_factor = text_float(&text);
    args.tensor_count = (size_t)text_int(&text);
    struct posted *posted = calloc(1, sizeof *posted + args.tensor_count * sizeof posted->blocks[0]);
    struct bhvd_tensor *tensors = calloc(args.tensor_count + 1, sizeof *tensors);
    int64_t *dims = calloc(args.tensor_count + 1, KERNEL_MAX_NDIM * sizeof *dims);
    posted->count = args.tensor_count;
    for (size_t i = 0; i < args.tensor_count; i++) {
        struct operand *block = &posted->blocks[i];
        size_t nbytes = text_tensor(&text, &tensors[i], dims + i * KERNEL_MAX_NDIM);
        block->nbytes = (size_t)text_int(&text);
        block->src = staging_acquire(nbytes);
        memcpy(block->src, ins[i], nbytes);
        if (args.kind == BHVD_ALLREDUCE || args.kind == BHVD_BROADCAST)
            block->dst = block->src;
        else if (args.kind == BHVD_REDUCESCATTER)
            block->dst = staging_acquire(block->nbytes);
        tensors[i].src = block->src;
        tensors[i].dst = block->dst;
    }
    args.name = text_rest(&text);
    args.tensors = args.tensor_count ? tensors : NULL;
    bhvd_context *context = core_acquire(NULL);
    if (!context)
        xla_fail(status, CORE_NOT_INITIALIZED);
    else if (core.post(context, &args, &posted->handle, &error) != BHVD_OK)
        xla_fail(status, error.message);
    core_release();
    if (!posted->handle) {
        posted_free(posted);
        posted = NULL;
    }
    *(int64_t *)outs[0] = (int64_t)(intptr_t)posted;
    *(int64_t *)outs[1] = 0;
    free(dims);
    free(tensors);
    free(text.begin);
}

/* Copies result i to the program's buffer; false: the sizes differ. */
static bool copy_result(const struct posted *posted, size_t i, void *out)
{
    const struct operand *block = &posted->blocks[i];
    if (block->dst) {
        memcpy(out, block->dst, block->nbytes);
        return true;
    }
    struct bhvd_result result;
    if (core.result_take(posted->handle, i, &result) != BHVD_OK)
        return false;
    bool fits = result.nbytes == block->nbytes;
    if (fits && result.nbytes)
        memcpy(out, result.data, result.nbytes);
    core.result_free(result.data);
    return fits;
}

/* Operands: the posted operation, the token of the previous wait. Results: the tensors (an int32 if there are none), the token. */
static void wait(void **outs, const void **ins, const char *chars, size_t nchars, xla_status *status)
{
    (void)chars, (void)nchars;
    struct posted *posted = (struct posted *)(intptr_t)*(const int64_t *)ins[0];
    struct bhvd_error error;
    if (!posted)
        return;
    /* The context may be shut down in the meantime, but must live until the wait has returned. */
    core_acquire(NULL);
    completion_begin();
    core_release();
    bhvd_status end = core.wait(posted->handle, -1, &error);
    if (end != BHVD_OK) {
        xla_fail(status, error.message);
    } else {
        bool fits = true;
        for (size_t i = 0; i < posted->count; i++)
            fits = copy_result(posted, i, outs[i]) && fits;
        if (!fits)
            xla_fail(status, ROWS_DIFFER);
        if (!posted->count)
            *(int32_t *)outs[0] = (int32_t)core.handle_value(posted->handle);
        *(int64_t *)outs[posted->count ? posted->count : 1] = 0;
    }
    core.handle_drop(posted->handle);
    completion_end();
    posted_free(posted);
}

/* ----------------------------------------------------------------------------------------------------- bridge ---- */

/* Staging memory that Python and the program share. */
struct shared_block {
    struct bridge_memory memory;        /* first */
    size_t nbytes;
    atomic_int holders;
};

/* Also for Python. */
static void shared_block_drop(struct bridge_memory *memory)
{
    struct shared_block *block = (struct shared_block *)memory;
    if (atomic_fetch_sub(&block->holders, 1) == 1) {
        staging_release(memory->data);
        free(block);
    }
}

static void put(void **outs, const void **ins, const char *chars, size_t nchars, xla_status *status)
{
    struct text text = text_open(chars, nchars);
    struct bhvd_error error = { 0 };
    struct bhvd_tensor tensor;
    int64_t dims[KERNEL_MAX_NDIM];
    int64_t id = text_int(&text), index = text_int(&text);
    struct shared_block *block = calloc(1, sizeof *block);
    block->nbytes = text_tensor(&text, &tensor, dims);
    block->memory = (struct bridge_memory){ shared_block_drop, staging_acquire(block->nbytes) };
    atomic_init(&block->holders, 2);
    memcpy(block->memory.data, ins[0], block->nbytes);
    tensor.src = tensor.dst = block->memory.data;
    if (core.python_put(id, index, &tensor, &block->memory, &error) != BHVD_OK) {
        xla_fail(status, error.message);
        shared_block_drop(&block->memory);
        block = NULL;
    }
    *(int64_t *)outs[0] = (int64_t)(intptr_t)block;
    *(int64_t *)outs[1] = 0;
    free(text.begin);
}

/* Operands: the blocks, the token of the previous wait. Results: the tensors, the token. */
static void finish(void **outs, const void **ins, const char *chars, size_t nchars, xla_status *status)
{
    struct text text = text_open(chars, nchars);
    struct bhvd_error error = { 0 };
    int64_t id = text_int(&text), count = text_int(&text);
    int end = core.python_wait(id, &error);
    if (end != BHVD_OK)
        xla_fail(status, error.message);
    for (int64_t i = 0; i < count; i++) {
        struct shared_block *block = (struct shared_block *)(intptr_t)*(const int64_t *)ins[i];
        if (!block)
            continue;
        if (end == BHVD_OK)
            memcpy(outs[i], block->memory.data, block->nbytes);
        shared_block_drop(&block->memory);
    }
    *(int64_t *)outs[count] = 0;
    free(text.begin);
}

/* ------------------------------------------------------------------------------------------------------ facts ---- */

static void fact(void **outs, const void **ins, const char *chars, size_t nchars, xla_status *status)
{
    (void)ins;
    struct text text = text_open(chars, nchars);
    const char *message;
    int32_t process_set = (int32_t)text_int(&text), value = 0;
    if (fact_value(text_rest(&text), process_set, &value, &message) != BHVD_OK)
        xla_fail(status, message);
    *(int32_t *)outs[0] = value;
    *(int64_t *)outs[1] = 0;
    free(text.begin);
}

const char *xla_calls_register(void)
{
    static const struct { const char *name; xla_function *function; } calls[] = {
        { "bagua_hvd.post", post }, { "bagua_hvd.wait", wait }, { "bagua_hvd.put", put }, { "bagua_hvd.finish", finish },
        { "bagua_hvd.fact", fact },
    };
    const char *missing = load_registry();
    for (size_t i = 0; i < sizeof calls / sizeof *calls && !missing; i++) {
        struct cxx_string name = borrowed(calls[i].name), platform = borrowed("Host");
        add(registry(), &name, (void *)calls[i].function, &platform);
    }
    return missing;
}
