/* Registers the ops when tf.load_op_library loads this library. */
#include "tensorflow/bridge.h"
#include "tensorflow/collective_ops.h"
#include "tensorflow/fact.h"
#include "tensorflow/tf_api.h"
#include "tensorflow/xla.h"

#include <stdio.h>

static char problem[512];
static const char *xla_missing;

/* Why the ops are not available: a sentence, or NULL if they are. */
__attribute__((visibility("default"))) const char *bhvd_tf_problem(void) { return problem[0] ? problem : NULL; }

/* The API that this TensorFlow lacks for collectives in programs compiled by XLA, or NULL. */
__attribute__((visibility("default"))) const char *bhvd_tf_xla_missing(void) { return xla_missing; }

__attribute__((constructor)) static void load(void)
{
    const char *missing = tf_api_load();
    if (missing) {
        snprintf(problem, sizeof problem, "the installed TensorFlow has no %s in its C API: bagua_hvd needs "
                 "TensorFlow 2.16 or later", missing);
        return;
    }
    TF_Status *status = tf.NewStatus();
    if (!collective_register(status) || !fact_register(status) || !bridge_register(status))
        snprintf(problem, sizeof problem, "TensorFlow refused the ops of bagua_hvd: %s", tf.Message(status));
    tf.DeleteStatus(status);
    xla_missing = xla_calls_register();
}
