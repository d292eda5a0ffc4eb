// libnvrtc.so: compiles kernels with the host's C++ compiler, $CXX or c++. Instead of a cubin, the result is a library.
//
// The text is unchanged except for `extern __shared__`, which C++ cannot express. INCLUDE and LIBRARIES are the
// directories of device.h and of libcuda.so. Libraries are kept in LIBRARIES by their text: with another cache of the
// product, or a mistake in one file, only what differs is compiled.

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <regex>
#include <sstream>
#include <string>

namespace {

enum Result { SUCCESS = 0, INVALID_OPTION = 5, COMPILATION = 6 };

struct Program {
    std::string name, text, log, image;
};

// With -Og, kernels compile in 60 % of the time of -O1 and run equally fast, because the checks take most of the time.
// With frame pointers, a call of the emulator can find the caller of the function that contains it.
const char* const FLAGS =
    " -std=c++17 -Og -g1 -fPIC -w -ffp-contract=off -fno-strict-aliasing -fno-omit-frame-pointer -fsanitize=thread"
#ifdef __clang__
    " -mllvm -tsan-distinguish-volatile"
#define LINK_FLAGS " -Wl,--wrap=memcpy,--wrap=memset"
#else
#define LINK_FLAGS ""
    " -fno-gnu-unique --param tsan-distinguish-volatile=1"
#endif
    " -fsanitize=alignment,signed-integer-overflow,integer-divide-by-zero,shift,bounds"
    " -include " INCLUDE "/device.h";

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// For tests of the tests: $EMULATOR_REPLACE and $EMULATOR_BY are a part of a kernel and its replacement, in all files
// of the folder $EMULATOR_FOLDER.
std::string changed(const std::string& name, std::string text) {
    const char *folder = getenv("EMULATOR_FOLDER"), *part = getenv("EMULATOR_REPLACE"), *by = getenv("EMULATOR_BY");
    if (!folder || !part || !by || name.compare(0, strlen(folder), folder)) return text;
    size_t at = text.find(part);
    return at == std::string::npos ? text : text.replace(at, strlen(part), by);
}

std::string translated(const std::string& text) {
    static const std::regex shared(R"(extern\s+__shared__\s+(\w+)\s+(\w+)\[\];)");
    static const std::regex kernel(R"(__global__\s+void\s+(?:__launch_bounds__\([^;{]*?\)\s+)?(\w+)\()");
    std::string result = std::regex_replace(text, shared, "$1* $2 = ($1*)emulator_dynamic_shared();");
    std::string calls;
    for (std::sregex_iterator it(text.begin(), text.end(), kernel), end; it != end; ++it)
        calls += "EMULATOR_KERNEL(" + (*it)[1].str() + ")\n";
    return result + "\n" + calls;
}

std::string quoted(const std::string& option) {
    std::string text = "'";
    for (char c : option) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return text + "'";
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) { return *major = 0, *minor = 0, SUCCESS; }
const char* nvrtcGetErrorString(int) { return "the compilation has failed"; }
int nvrtcCreateProgram(
    Program** result, const char* text, const char* name, int, const char* const*, const char* const*
) {
    return *result = new Program{name ? name : "", text, "", ""}, SUCCESS;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, SUCCESS; }

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    std::string macros;
    for (int i = 0; i < count; i++) {
        static const std::string macro = "--define-macro=";
        if (!strncmp(options[i], macro.c_str(), macro.size())) macros += " -D" + quoted(options[i] + macro.size());
    }
    std::string text = changed(program->name, program->text);
    std::string kept = LIBRARIES "/kernel-" + std::to_string(std::hash<std::string>()(macros + text)) + ".so";
    if (access(kept.c_str(), R_OK) == 0) return program->image = read(kept), SUCCESS;
    // On the file system of LIBRARIES, so that the library can be moved there.
    char dir[] = LIBRARIES "/nvrtc-XXXXXX";
    if (!mkdtemp(dir)) return program->log = "failed to create a temporary directory", COMPILATION;
    const char* compiler = getenv("CXX");
    std::string base = std::string(dir) + "/kernel", cxx = compiler && *compiler ? compiler : "c++";
    std::ofstream(base + ".cpp") << translated(text);
    // Linked separately: libcuda.so replaces the libraries of the sanitizers.
    std::string object = base + ".o";
    std::string compile = cxx + FLAGS + macros + " -c " + base + ".cpp -o " + object;
    std::string link = cxx + " -shared -Wl,-Bsymbolic" LINK_FLAGS " " + object + " -o " + base + ".so -L" LIBRARIES " -lcuda";
    std::string command = "{ " + compile + " && " + link + "; } > " + base + ".log 2>&1";
    int code = system(command.c_str());
    program->log = read(base + ".log");
    program->image = read(base + ".so");
    if (code == 0) rename((base + ".so").c_str(), kept.c_str());
    for (const char* suffix : {".cpp", ".o", ".so", ".log"}) unlink((base + suffix).c_str());
    rmdir(dir);
    return code == 0 ? SUCCESS : COMPILATION;
}

int nvrtcGetCUBINSize(Program* program, size_t* bytes) { return *bytes = program->image.size(), SUCCESS; }
int nvrtcGetCUBIN(Program* program, char* image) {
    memcpy(image, program->image.data(), program->image.size());
    return SUCCESS;
}
int nvrtcGetProgramLogSize(Program* program, size_t* bytes) { return *bytes = program->log.size() + 1, SUCCESS; }
int nvrtcGetProgramLog(Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}
}
