/* Tests of the search for the CUDA driver: if the driver is not usable, the error text says why.
 *
 * A shared library that this file builds takes the driver's place. Environment variables set its results.
 */
#include "test.h"

#include "device/cuda_driver.h"

static char folder[] = "/tmp/fsdpc-driver-XXXXXX";

/* Most entries of this driver are the function `other`, because the tests never look at their results. */
static const char *const fake =
    "#include <stdlib.h>\n"
    "#include <string.h>\n"
    "static int number(const char *name, int otherwise) {\n"
    "    const char *text = getenv(name);\n"
    "    return text ? atoi(text) : otherwise;\n"
    "}\n"
    "static unsigned start(unsigned flags) {\n"
    "    (void)flags; return (unsigned)number(\"FAKE_INIT\", 0);\n"
    "}\n"
    "static unsigned version(int *out) {\n"
    "    *out = number(\"FAKE_VERSION\", 12040); return 0;\n"
    "}\n"
    "static unsigned count(int *out) {\n"
    "    *out = number(\"FAKE_COUNT\", 2); return 0;\n"
    "}\n"
    "static unsigned name(unsigned code, const char **out) {\n"
    "    *out = code == 2 ? \"CUDA_ERROR_OUT_OF_MEMORY\" : NULL;\n"
    "    return 0;\n"
    "}\n"
    "static unsigned other(void) { return 801; }\n"
    "unsigned cuGetProcAddress_v2(const char *entry, void **out,\n"
    "        int version_wanted, unsigned long flags, int *found) {\n"
    "    const char *lacks = getenv(\"FAKE_LACKS\");\n"
    "    *found = 0;\n"
    "    if (flags != 1 || version_wanted < 12000) { return 1; }\n"
    "    *out = (void *)other;\n"
    "    if (!strcmp(entry, \"cuInit\")) { *out = (void *)start; }\n"
    "    if (!strcmp(entry, \"cuDriverGetVersion\")) {\n"
    "        *out = (void *)version;\n"
    "    }\n"
    "    if (!strcmp(entry, \"cuDeviceGetCount\")) {\n"
    "        *out = (void *)count;\n"
    "    }\n"
    "    if (!strcmp(entry, \"cuGetErrorName\")) { *out = (void *)name; }\n"
    "    if (!strcmp(entry, \"cuGetErrorString\")) {\n"
    "        *out = (void *)name;\n"
    "    }\n"
    "    if (lacks && !strcmp(entry, lacks)) { *out = NULL; return 500; }\n"
    "    return 0;\n"
    "}\n";

static void
build(const char *file, const char *text)
{
    char source[128], command[512];
    snprintf(source, sizeof source, "%s/%s.c", folder, file);
    FILE *out = fopen(source, "w");
    REQUIRE(out != NULL && fputs(text, out) >= 0 && fclose(out) == 0);
    const char *cc = getenv("CC");
    snprintf(command, sizeof command, "%s -shared -fPIC -o %s/%s.so %s", cc ? cc : "cc", folder,
             file, source);
    if (system(command) != 0) {
        test_skip("no compiler (CC, or cc) to make a driver with");
    }
    snprintf(source, sizeof source, "%s/%s.so", folder, file);
    setenv("FSDPC_LIBCUDA", source, 1);
}

static void
with(const char *name, const char *value, const char *sentence)
{
    const fsdpc_cuda_driver *driver = (const fsdpc_cuda_driver *)&driver;
    setenv(name, value, 1);
    CHECK_ERROR(fsdpc_cuda_driver_get(&driver), FSDPC_E_UNAVAILABLE, sentence);
    CHECK(driver == NULL);
    unsetenv(name);
}

static void
each_kind_of_absence_has_its_sentence(void)
{
    with("FSDPC_LIBCUDA", "/nowhere/libcuda.so.1", "/nowhere/libcuda.so.1");
    build("empty", "int nothing;\n");
    with("FAKE_INIT", "0", "lacks cuGetProcAddress_v2");
    build("fake", fake);
    with("FAKE_LACKS", "cuLaunchKernel", "lacks cuLaunchKernel");
    with("FAKE_INIT", "34", "stub");
    with("FAKE_INIT", "100", "no GPU");
    with("FAKE_INIT", "3", "forked");
    with("FAKE_INIT", "801", "does not start");
    with("FAKE_VERSION", "11080", "version 11.8");
    with("FAKE_COUNT", "0", "no GPU");
}

static void
failures_leave_no_trace_and_success_stays(void)
{
    const fsdpc_cuda_driver *driver, *again;
    setenv("FAKE_LACKS", "cuMemCreate", 1);
    REQUIRE_OK(fsdpc_cuda_driver_get(&driver));
    CHECK_INT(driver->version, 12040);
    CHECK_INT(driver->device_count, 2);
    CHECK(driver->mem_create == NULL && driver->mem_map != NULL);
    setenv("FSDPC_LIBCUDA", "/nowhere", 1);
    REQUIRE_OK(fsdpc_cuda_driver_get(&again));
    CHECK(again == driver);
}

static void
results_become_statuses(void)
{
    const fsdpc_cuda_driver *driver;
    REQUIRE_OK(fsdpc_cuda_driver_get(&driver));
    CHECK_INT(fsdpc_cuda_check(driver, 0, "nothing"), FSDPC_OK);
    CHECK_ERROR(fsdpc_cuda_check(driver, 2, "slot of unit %s", "layer.3"), FSDPC_E_DEVMEM,
                "slot of unit layer.3: CUDA_ERROR_OUT_OF_MEMORY (2)");
    CHECK_ERROR(fsdpc_cuda_check(driver, 801, "a call"), FSDPC_E_UNAVAILABLE, "801");
    CHECK_ERROR(fsdpc_cuda_check(driver, 700, "a call"), FSDPC_E_INTERNAL, "unknown CUDA error");
}

int
main(void)
{
    REQUIRE(mkdtemp(folder) != NULL);
    each_kind_of_absence_has_its_sentence();
    failures_leave_no_trace_and_success_stays();
    results_become_statuses();
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_INT(system(command), 0);
    return test_result();
}
