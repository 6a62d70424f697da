/* The C++ objects defined by hand here have the layout of libstdc++, with which TensorFlow is built. This is checked
 * before anything is registered: a failure is written, and read back by TensorFlow's own function. */
#include "tensorflow/xla_api.h"

#include "tensorflow/tf_api.h"

#include <string.h>

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
struct xla_status {
    struct cxx_string message;
    bool has_message;
};

/* std::optional<absl::string_view>, returned in memory. */
struct optional_view {
    size_t size;
    const char *data;
    bool has_value;
};

static const char library[] = "libtensorflow_cc.so.2";
static void *(*registry)(void);
static void (*add)(void *registry, const struct cxx_string *name, void *function, const struct cxx_string *platform);
static struct optional_view (*get_message)(const xla_status *);
static void *(*new)(size_t);

static struct cxx_string borrowed(const char *text)
{
    return (struct cxx_string){ .data = (char *)text, .size = strlen(text), .capacity = strlen(text) };
}

void xla_fail(xla_status *status, const char *message)
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

static const char *load(void)
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

const char *xla_register(const char *name, xla_function *function)
{
    const char *missing = load();
    if (missing)
        return missing;
    struct cxx_string name_string = borrowed(name), platform = borrowed("Host");
    add(registry(), &name_string, (void *)function, &platform);
    return NULL;
}
