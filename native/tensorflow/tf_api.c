#include "tensorflow/tf_api.h"

#include <dlfcn.h>

struct tf_api tf;

void *tf_api_symbol(const char *library, const char *symbol)
{
    /* By name: Python loads libraries without making their symbols global. NOLOAD: never a second TensorFlow. */
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle)
        return NULL;
    void *address = dlsym(handle, symbol);
    dlclose(handle);
    return address;
}

const char *tf_api_load(void)
{
    static const char library[] = "libtensorflow_framework.so.2";
#define TF_API_FIND(result, name, parameters) \
    *(void **)&tf.name = tf_api_symbol(library, "TF_" #name); \
    if (!tf.name) \
        return "TF_" #name;
    TF_API_FUNCTIONS(TF_API_FIND)
#undef TF_API_FIND
    return NULL;
}
