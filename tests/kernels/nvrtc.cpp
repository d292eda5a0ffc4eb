// libnvrtc.so: compiles kernels with the host's C++ compiler, $CXX or c++. Instead of a cubin, the result is a library.
//
// The text is unchanged except for `extern __shared__`, which C++ cannot express. INCLUDE and LIBRARIES are the
// directories of device.h and of libcuda.so. Libraries are kept in LIBRARIES by their text, for all processes: in
// another rank or suite, or with a mistake in one file, only what differs is compiled.

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
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
// DWARF 4, because addr2line takes the names of some files wrong in DWARF 5 as GCC 12 writes it.
const char* const FLAGS =
    " -std=c++17 -Og -g1 -gdwarf-4 -fPIC -w -ffp-contract=off -fno-strict-aliasing -fno-omit-frame-pointer"
    " -fsanitize=thread"
#ifdef __clang__
    " -mllvm -tsan-distinguish-volatile"
#define LINK_FLAGS " -Wl,--wrap=memcpy,--wrap=memset"
#else
#define LINK_FLAGS ""
    " -fno-gnu-unique --param tsan-distinguish-volatile=1"
#endif
    " -fsanitize=alignment,signed-integer-overflow,integer-divide-by-zero,shift,bounds";

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

// Held by one thread of all processes that use LIBRARIES. Others that want the same file find it afterwards.
class FileLock {
public:
    explicit FileLock(const std::string& name) : file(open((LIBRARIES "/" + name).c_str(), O_CREAT | O_CLOEXEC, 0666)) {
        flock(file, LOCK_EX);
    }
    ~FileLock() { close(file); }

private:
    int file;
};

// Runs a command of the shell, which makes a file in LIBRARIES: it gets the path of a temporary directory there in $D,
// and what it writes to $D/made becomes the file. Returns whether it succeeds.
bool make(const std::string& path, const std::string& text, const std::string& command, std::string* log) {
    char dir[] = LIBRARIES "/nvrtc-XXXXXX";
    if (!mkdtemp(dir)) return *log = "failed to create a temporary directory", false;
    std::string base = std::string(dir) + "/";
    std::ofstream(base + "kernel.cpp") << text;
    bool made = !system(("{ D=" + quoted(dir) + "; " + command + "; } > " + quoted(base + "log") + " 2>&1").c_str());
    *log = read(base + "log");
    if (made) made = !rename((base + "made").c_str(), path.c_str());
    for (const char* name : {"kernel.cpp", "kernel.o", "made", "log"}) unlink((base + name).c_str());
    rmdir(dir);
    return made;
}

// Returns the option that begins a kernel with device.h. GCC compiles that header once for all kernels.
std::string device_header(const std::string& cxx) {
#ifdef __clang__
    return " -include " INCLUDE "/device.h";
#else
    FileLock lock("header.lock");
    // GCC looks for the compiled header first, and reads the other one if it cannot use that.
    std::string header = LIBRARIES "/device.h", compiled = header + ".gch", log;
    if (access(compiled.c_str(), R_OK)) {
        std::ofstream(header) << "#include \"" INCLUDE "/device.h\"\n";
        make(compiled, "", cxx + FLAGS + " -x c++-header " INCLUDE "/device.h -o $D/made", &log);
    }
    return " -include " + header;
#endif
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
    size_t hash = std::hash<std::string>()(macros + text);
    std::string kept = LIBRARIES "/kernel-" + std::to_string(hash) + ".so";
    FileLock lock(std::to_string(hash % 64) + ".lock");
    if (access(kept.c_str(), R_OK)) {
        const char* compiler = getenv("CXX");
        std::string cxx = compiler && *compiler ? compiler : "c++";
        std::string compile = cxx + FLAGS + device_header(cxx) + macros + " -c $D/kernel.cpp -o $D/kernel.o";
        // Linked separately: libcuda.so replaces the libraries of the sanitizers. Reading those of C++ would take most
        // of the time.
        std::string link = cxx + " -shared -nostdlib -Wl,-Bsymbolic" LINK_FLAGS " $D/kernel.o -o $D/made -L" LIBRARIES
                           " -lcuda -lm";
        if (!make(kept, translated(text), compile + " && " + link, &program->log)) return COMPILATION;
    }
    return program->image = read(kept), SUCCESS;
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
