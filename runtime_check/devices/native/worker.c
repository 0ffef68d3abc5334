// The worker for devices without Python: runs one .tflite through LiteRT's C API (CompiledModel).
//
//     t2e_worker LIBLITERT VERSION
//
// Speaks the protocol of docs/architecture.md on stdin and stdout, as worker.py does: a length, a
// JSON header, raw tensors. LIBLITERT is opened at run time, so that this program needs a C library
// only, and its types are declared here: they are LiteRT's C headers (litert/c), API 2.x.
//
// Built for arm64 by build.sh; the result lies beside this file.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#ifndef SOURCE_SHA256
#define SOURCE_SHA256 "unknown"
#endif

// ------------------------------------------------------------------------------ LiteRT's C API

typedef void *Handle;
typedef int Status;

enum { MAX_RANK = 8, BYTES_MAX_HEADER = 64 << 20 };

typedef struct {
  unsigned int rank : 7;
  unsigned int has_strides : 1;
  int32_t dims[MAX_RANK];
  uint32_t strides[MAX_RANK];
} Layout;

typedef struct {
  int element_type;
  Layout layout;
} TensorType;

typedef struct {
  float scale;
  int64_t zero_point;
} PerTensor;

_Static_assert(sizeof(Layout) == 68 && sizeof(TensorType) == 72, "LiteRT's layout");

enum { READING = 0, WRITING = 1 };
enum { ACCELERATOR_CPU = 1 };
enum { QUANTIZED_PER_TENSOR = 1 };

#define API(X)                                                                              \
  X(CreateEnvironment, (int, const void *, Handle *))                                       \
  X(CreateModelFromBuffer, (Handle, const void *, size_t, Handle *))                        \
  X(CreateOptions, (Handle *))                                                              \
  X(SetOptionsHardwareAccelerators, (Handle, int))                                          \
  X(CreateOpaqueOptions, (const char *, void *, void (*)(void *), Handle *))                \
  X(AddOpaqueOptions, (Handle, Handle))                                                     \
  X(CreateCompiledModel, (Handle, Handle, Handle, Handle *))                                \
  X(CompiledModelIsFullyAccelerated, (Handle, bool *))                                      \
  X(CompiledModelResizeInputTensor, (Handle, size_t, size_t, const int *, size_t))          \
  X(GetCompiledModelOutputTensorLayouts, (Handle, size_t, size_t, Layout *, bool))          \
  X(GetCompiledModelInputBufferRequirements, (Handle, size_t, size_t, Handle *))            \
  X(GetCompiledModelOutputBufferRequirements, (Handle, size_t, size_t, Handle *))           \
  X(RunCompiledModel, (Handle, size_t, size_t, Handle *, size_t, Handle *))                 \
  X(GetNumModelSignatures, (Handle, size_t *))                                              \
  X(GetModelSignature, (Handle, size_t, Handle *))                                          \
  X(GetSignatureKey, (Handle, const char **))                                               \
  X(GetNumSignatureInputs, (Handle, size_t *))                                              \
  X(GetNumSignatureOutputs, (Handle, size_t *))                                             \
  X(GetSignatureInputName, (Handle, size_t, const char **))                                 \
  X(GetSignatureOutputName, (Handle, size_t, const char **))                                \
  X(GetSignatureInputTensorByIndex, (Handle, size_t, Handle *))                             \
  X(GetSignatureOutputTensorByIndex, (Handle, size_t, Handle *))                            \
  X(GetTensorIndex, (Handle, uint32_t *))                                                   \
  X(GetRankedTensorType, (Handle, TensorType *))                                            \
  X(GetQuantizationTypeId, (Handle, int *))                                                 \
  X(GetPerTensorQuantization, (Handle, PerTensor *))                                        \
  X(CreateManagedTensorBufferFromRequirements, (Handle, const TensorType *, Handle, Handle *)) \
  X(LockTensorBuffer, (Handle, void **, int))                                               \
  X(UnlockTensorBuffer, (Handle))                                                           \
  X(GetTensorBufferSize, (Handle, size_t *))

#define DECLARE(name, arguments) static Status(*name) arguments;
API(DECLARE)
static void (*DestroyTensorBuffer)(Handle);

static void open_litert(const char *path) {
  void *library = dlopen(path, RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    exit(2);
  }
  void *found;
#define FIND(name, arguments)                                  \
  if (!(found = dlsym(library, "LiteRt" #name))) {             \
    fprintf(stderr, "this LiteRT has no LiteRt" #name "\n");   \
    exit(3);                                                   \
  }                                                            \
  memcpy(&name, &found, sizeof found);
  API(FIND)
  FIND(DestroyTensorBuffer, (Handle))
}

static const char *status_name(Status status) {
  switch (status) {
    case 1: return "InvalidArgument";
    case 2: return "MemoryAllocationFailure";
    case 3: return "RuntimeFailure";
    case 4: return "MissingInputTensor";
    case 5: return "Unsupported";
    case 6: return "NotFound";
    case 500: return "FileIO";
    case 501: return "InvalidFlatbuffer";
    default: return "LiteRtError";
  }
}

typedef struct {
  int type;
  const char *name;
  size_t bytes;
} Dtype;

static const Dtype DTYPES[] = {
    {1, "float32", 4}, {2, "int32", 4},    {3, "uint8", 1},    {4, "int64", 8},   {6, "bool", 1},
    {7, "int16", 2},   {9, "int8", 1},     {10, "float16", 2}, {11, "float64", 8}, {8, "complex64", 8},
    {13, "uint64", 8}, {16, "uint32", 4},  {17, "uint16", 2},
};

static const Dtype *dtype_of(int type) {
  for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
    if (DTYPES[i].type == type) return &DTYPES[i];
  return NULL;
}

// ------------------------------------------------------------------------------------- failures

// One failed request: its answer is sent, then the next request is read.
static char fault_type[64], fault_text[2048];

static bool fault(const char *type, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  snprintf(fault_type, sizeof fault_type, "%s", type);
  vsnprintf(fault_text, sizeof fault_text, format, arguments);
  va_end(arguments);
  return false;
}

#define TRY(call)                                                                 \
  do {                                                                            \
    Status status_ = (call);                                                      \
    if (status_) return fault(status_name(status_), "%s: status %d", #call, status_); \
  } while (0)

static void *allocate(size_t bytes) {
  void *memory = calloc(1, bytes ? bytes : 1);
  if (!memory) {
    fprintf(stderr, "out of memory: %zu bytes wanted\n", bytes);
    abort();
  }
  return memory;
}

// ----------------------------------------------------------------------------------------- JSON

typedef struct Json {
  enum { NIL, BOOL, NUMBER, STRING, LIST, OBJECT } kind;
  double number;
  char *text;  // a string's value
  char *key;   // its name inside of an object
  struct Json *first, *next;
} Json;

static const char *at;  // where the parser is

static void spaces(void) {
  while (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r') at++;
}

static unsigned hex4(void) {
  unsigned value = 0;
  for (int i = 0; i < 4 && *at; i++, at++) {
    char c = *at;
    value = value * 16 + (c >= 'a' ? c - 'a' + 10 : c >= 'A' ? c - 'A' + 10 : c - '0');
  }
  return value;
}

static char *parse_text(void) {
  // The text is never longer than its escaped form, which ends at the first bare quote.
  const char *end = at + 1;
  while (*end && *end != '"') end += *end == '\\' && end[1] ? 2 : 1;
  char *text = allocate((size_t)(end - at) + 1), *out = text;
  for (at++; *at && *at != '"';) {
    if (*at != '\\') {
      *out++ = *at++;
      continue;
    }
    char c = *++at;
    if (!c) break;
    at++;
    if (c != 'u') {
      *out++ = c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c == 'b' ? '\b' : c == 'f' ? '\f' : c;
      continue;
    }
    unsigned code = hex4();
    if (code >= 0xD800 && code < 0xDC00 && at[0] == '\\' && at[1] == 'u') {
      at += 2;
      code = 0x10000 + ((code - 0xD800) << 10) + (hex4() - 0xDC00);
    }
    if (code < 0x80) {
      *out++ = (char)code;
    } else if (code < 0x800) {
      *out++ = (char)(0xC0 | code >> 6), *out++ = (char)(0x80 | (code & 63));
    } else if (code < 0x10000) {
      *out++ = (char)(0xE0 | code >> 12), *out++ = (char)(0x80 | (code >> 6 & 63));
      *out++ = (char)(0x80 | (code & 63));
    } else {
      *out++ = (char)(0xF0 | code >> 18), *out++ = (char)(0x80 | (code >> 12 & 63));
      *out++ = (char)(0x80 | (code >> 6 & 63)), *out++ = (char)(0x80 | (code & 63));
    }
  }
  if (*at) at++;
  return text;
}

static Json *parse(void) {
  Json *value = allocate(sizeof *value);
  spaces();
  if (*at == '"') {
    value->kind = STRING;
    value->text = parse_text();
  } else if (*at == '{' || *at == '[') {
    char close = *at == '{' ? '}' : ']';
    value->kind = *at++ == '{' ? OBJECT : LIST;
    Json **tail = &value->first;
    for (spaces(); *at && *at != close; spaces()) {
      char *key = NULL;
      if (value->kind == OBJECT) {
        key = *at == '"' ? parse_text() : NULL;
        spaces();
        if (*at == ':') at++;
      }
      *tail = parse();
      (*tail)->key = key;
      tail = &(*tail)->next;
      spaces();
      if (*at == ',') at++;
    }
    if (*at) at++;
  } else if (!strncmp(at, "true", 4) || !strncmp(at, "false", 5)) {
    value->kind = BOOL;
    value->number = *at == 't';
    at += *at == 't' ? 4 : 5;
  } else if (!strncmp(at, "null", 4)) {
    at += 4;
  } else {
    char *end;
    value->kind = NUMBER;
    value->number = strtod(at, &end);
    at = end == at ? at + 1 : end;
  }
  return value;
}

static void free_json(Json *value) {
  while (value) {
    Json *next = value->next;
    free_json(value->first);
    free(value->text);
    free(value->key);
    free(value);
    value = next;
  }
}

static Json *get(Json *object, const char *key) {
  for (Json *item = object ? object->first : NULL; item; item = item->next)
    if (item->key && !strcmp(item->key, key)) return item;
  return NULL;
}

static const char *get_text(Json *object, const char *key, const char *otherwise) {
  Json *item = get(object, key);
  return item && item->kind == STRING ? item->text : otherwise;
}

static double get_number(Json *object, const char *key, double otherwise) {
  Json *item = get(object, key);
  return item && item->kind == NUMBER ? item->number : otherwise;
}

// ------------------------------------------------------------------------------------- the pipe

static FILE *requests, *answers;

static void exactly(void *memory, size_t bytes) {
  if (bytes && fread(memory, 1, bytes, requests) != bytes) exit(0);  // the parent is gone
}

typedef struct {
  char *text;
  size_t length, room;
} Text;

static void put(Text *text, const char *format, ...) {
  for (;;) {
    va_list arguments;
    va_start(arguments, format);
    size_t left = text->room - text->length;
    int wanted = vsnprintf(text->text ? text->text + text->length : NULL, left, format, arguments);
    va_end(arguments);
    if ((size_t)wanted < left) {
      text->length += (size_t)wanted;
      return;
    }
    text->room = (text->room + (size_t)wanted + 1) * 2;
    text->text = realloc(text->text, text->room);
    if (!text->text) abort();
  }
}

static void put_quoted(Text *text, const char *value) {
  put(text, "\"");
  for (; *value; value++) {
    unsigned char c = (unsigned char)*value;
    if (c == '"' || c == '\\') put(text, "\\%c", c);
    else if (c < 0x20) put(text, "\\u%04x", c);
    else put(text, "%c", c);
  }
  put(text, "\"");
}

static void send_header(Text *text) {
  uint32_t length = (uint32_t)text->length;
  fwrite(&length, 4, 1, answers);
  fwrite(text->text, 1, text->length, answers);
  free(text->text);
}

static double now_ms(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

// ------------------------------------------------------------------------------------ the model

typedef struct {
  char *name;
  uint32_t index;    // of the tensor in its graph
  TensorType fixed;  // as the file says it; a dynamic size is negative
  TensorType now;    // as it is allocated
  Handle buffer;
  bool shared;       // the buffer is another one's, since both are one tensor of the graph
  size_t bytes;      // of the values, without padding
  bool quantized;
  PerTensor scale;
} Tensor;

typedef struct {
  char *name;
  size_t inputs, outputs;
  Tensor *in, *out;
  bool ready;    // buffers fit the shapes in ``now``
  bool checked;  // every output was seen to be written at these shapes
} Signature;

static Handle environment, model, compiled;
static Signature *signatures;
static size_t signature_count;

static size_t bytes_of(const TensorType *type) {
  size_t bytes = dtype_of(type->element_type)->bytes;
  for (unsigned i = 0; i < type->layout.rank; i++) bytes *= (size_t)type->layout.dims[i];
  return bytes;
}

// ------------------------------------------------------------- dynamic sizes, out of the file itself

// LiteRT's C API tells a dynamic size as 1. The file has it as -1 in the tensor's shape_signature.
// Field numbers: tflite/schema/schema.fbs. Whatever lies outside of the file reads as 0.
enum { MODEL_SUBGRAPHS = 2, MODEL_SIGNATURES = 7, SIGNATURE_KEY = 2, SIGNATURE_SUBGRAPH = 4 };
enum { SUBGRAPH_TENSORS = 0, TENSOR_SHAPE_SIGNATURE = 7 };

static const unsigned char *file;
static size_t file_size;

static uint32_t word(size_t place, size_t bytes) {
  uint32_t value = 0;
  if (place < file_size && bytes <= file_size - place) memcpy(&value, file + place, bytes);
  return value;
}

// Where the value of a table's field lies; 0 if it is not set.
static size_t field(size_t table, unsigned number) {
  if (!table) return 0;
  size_t names = table - (size_t)(int32_t)word(table, 4);
  size_t entry = 4 + 2 * (size_t)number;
  uint32_t offset = entry < word(names, 2) ? word(names + entry, 2) : 0;
  return offset ? table + offset : 0;
}

static size_t follow(size_t place) { return place && word(place, 4) ? place + word(place, 4) : 0; }

// An element of a vector of tables.
static size_t element(size_t vector, size_t index) {
  return vector && index < word(vector, 4) ? follow(vector + 4 + 4 * index) : 0;
}

static size_t graph_of(const char *signature) {
  size_t model = word(0, 4), index = 0;
  size_t entries = follow(field(model, MODEL_SIGNATURES));
  for (size_t i = 0; entries && i < word(entries, 4); i++) {
    size_t entry = element(entries, i), key = follow(field(entry, SIGNATURE_KEY));
    size_t length = strlen(signature);
    if (key && word(key, 4) == length && key + 4 + length <= file_size &&
        !memcmp(file + key + 4, signature, length)) {
      size_t number = field(entry, SIGNATURE_SUBGRAPH);
      index = number ? word(number, 4) : 0;
    }
  }
  return element(follow(field(model, MODEL_SUBGRAPHS)), index);
}

static void read_dynamic_sizes(size_t graph, Tensor *tensor) {
  size_t entry = element(follow(field(graph, SUBGRAPH_TENSORS)), tensor->index);
  size_t sizes = follow(field(entry, TENSOR_SHAPE_SIGNATURE));
  if (!sizes || word(sizes, 4) != tensor->fixed.layout.rank) return;
  for (unsigned i = 0; i < tensor->fixed.layout.rank; i++)
    if ((int32_t)word(sizes + 4 + 4 * i, 4) < 0) tensor->fixed.layout.dims[i] = -1;
}

static bool read_tensor(Handle tensor, Tensor *into) {
  int quantization = 0;
  TRY(GetTensorIndex(tensor, &into->index));
  TRY(GetRankedTensorType(tensor, &into->fixed));
  into->now = into->fixed;
  if (!dtype_of(into->fixed.element_type))
    return fault("Unsupported", "tensor '%s' has LiteRT's element type %d, which has no NumPy type",
                 into->name, into->fixed.element_type);
  if (!GetQuantizationTypeId(tensor, &quantization) && quantization == QUANTIZED_PER_TENSOR)
    into->quantized = !GetPerTensorQuantization(tensor, &into->scale);
  return true;
}

static bool read_signatures(void) {
  TRY(GetNumModelSignatures(model, &signature_count));
  signatures = allocate(signature_count * sizeof *signatures);
  for (size_t s = 0; s < signature_count; s++) {
    Signature *signature = &signatures[s];
    Handle handle, tensor;
    const char *name;
    TRY(GetModelSignature(model, s, &handle));
    TRY(GetSignatureKey(handle, &name));
    signature->name = strdup(name);
    size_t graph = graph_of(name);
    TRY(GetNumSignatureInputs(handle, &signature->inputs));
    TRY(GetNumSignatureOutputs(handle, &signature->outputs));
    signature->in = allocate(signature->inputs * sizeof *signature->in);
    signature->out = allocate(signature->outputs * sizeof *signature->out);
    for (size_t i = 0; i < signature->inputs; i++) {
      TRY(GetSignatureInputName(handle, i, &name));
      signature->in[i].name = strdup(name);
      TRY(GetSignatureInputTensorByIndex(handle, i, &tensor));
      if (!read_tensor(tensor, &signature->in[i])) return false;
      read_dynamic_sizes(graph, &signature->in[i]);
    }
    for (size_t i = 0; i < signature->outputs; i++) {
      TRY(GetSignatureOutputName(handle, i, &name));
      signature->out[i].name = strdup(name);
      TRY(GetSignatureOutputTensorByIndex(handle, i, &tensor));
      if (!read_tensor(tensor, &signature->out[i])) return false;
      read_dynamic_sizes(graph, &signature->out[i]);
    }
  }
  return true;
}

static void *read_file(const char *path, size_t *size) {
  struct stat status;
  int file = open(path, O_RDONLY);
  if (file < 0 || fstat(file, &status)) {
    if (file >= 0) close(file);
    return NULL;
  }
  *size = (size_t)status.st_size;
  void *data = *size ? mmap(NULL, *size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  return data == MAP_FAILED ? NULL : data;
}

static bool load(Json *request) {
  const char *path = get_text(request, "path", "");
  const char *kernels = get_text(request, "kernels", "default");
  double limit = get_number(request, "limit_bytes", 0);
  if (compiled) return fault("ValueError", "a model is loaded already");
  if (get(request, "taps") && get(request, "taps")->first)
    return fault("Unsupported", "this worker cannot look at tensors inside of the graph");
  if (strcmp(get_text(request, "runtime", "compiled"), "compiled"))
    return fault("Unsupported", "this worker has the CompiledModel runtime only");
  const char *mode = !strcmp(kernels, "default")     ? "delegate"
                     : !strcmp(kernels, "builtin")   ? "builtin"
                     : !strcmp(kernels, "reference") ? "reference"
                                                     : NULL;
  if (!mode) return fault("ValueError", "kernels '%s'", kernels);
  if (limit > 0) {
    struct rlimit most = {(rlim_t)limit, (rlim_t)limit};
    if (setrlimit(RLIMIT_DATA, &most)) return fault("OSError", "the memory limit cannot be set");
  }
  size_t size;
  void *data = read_file(path, &size);  // stays: the model points into it
  if (!data) return fault("FileIO", "'%s' cannot be read", path);
  // A flatbuffer's identifier: LiteRT tells a text file and a damaged model alike.
  if (size < 8 || memcmp((char *)data + 4, "TFL3", 4))
    return fault("InvalidFlatbuffer", "'%s' is no .tflite file", path);

  Handle options, cpu, runtime;
  Text toml = {0};
  put(&toml, "kernel_mode = \"%s\"\nnum_threads = %d\n", mode, (int)get_number(request, "threads", 1));
  Json *flags = get(request, "xnnpack_flags");
  if (flags && flags->kind == NUMBER) put(&toml, "flags = %u\n", (unsigned)flags->number);
  file = data, file_size = size;
  TRY(CreateEnvironment(0, NULL, &environment));
  TRY(CreateModelFromBuffer(environment, data, size, &model));
  if (!read_signatures()) return false;
  TRY(CreateOptions(&options));
  TRY(SetOptionsHardwareAccelerators(options, ACCELERATOR_CPU));
  // "xnnpack" is LrtGetCpuOptionsIdentifier() of litert/c/options/litert_cpu_options.cc.
  TRY(CreateOpaqueOptions("xnnpack", toml.text, free, &cpu));
  TRY(AddOpaqueOptions(options, cpu));
  // The kernels' own words on a failure go to stderr; by default they go nowhere.
  TRY(CreateOpaqueOptions("runtime_options_string", strdup("error_reporter_mode = 1\n"), free, &runtime));
  TRY(AddOpaqueOptions(options, runtime));
  TRY(CreateCompiledModel(environment, model, options, &compiled));
  return true;
}

static void put_tensor(Text *text, const Tensor *tensor) {
  put(text, "{\"name\": ");
  put_quoted(text, tensor->name);
  put(text, ", \"dtype\": \"%s\", \"shape\": [", dtype_of(tensor->fixed.element_type)->name);
  for (unsigned i = 0; i < tensor->fixed.layout.rank; i++)
    put(text, "%s%d", i ? ", " : "", tensor->fixed.layout.dims[i]);
  put(text, "]");
  if (tensor->quantized)
    put(text, ", \"scale\": %.17g, \"zero_point\": %lld", (double)tensor->scale.scale,
        (long long)tensor->scale.zero_point);
  put(text, "}");
}

static void put_signatures(Text *text) {
  put(text, "\"signatures\": [");
  for (size_t s = 0; s < signature_count; s++) {
    put(text, "%s{\"name\": ", s ? ", " : "");
    put_quoted(text, signatures[s].name);
    put(text, ", \"inputs\": [");
    for (size_t i = 0; i < signatures[s].inputs; i++) {
      if (i) put(text, ", ");
      put_tensor(text, &signatures[s].in[i]);
    }
    put(text, "], \"outputs\": [");
    for (size_t i = 0; i < signatures[s].outputs; i++) {
      if (i) put(text, ", ");
      put_tensor(text, &signatures[s].out[i]);
    }
    put(text, "]}");
  }
  put(text, "]");
}

// ---------------------------------------------------------------------------------------- a run

static void release(Tensor *tensor) {
  if (tensor->buffer && !tensor->shared) DestroyTensorBuffer(tensor->buffer);
  tensor->buffer = NULL;
  tensor->shared = false;
}

// LiteRT's buffers hold at least one byte.
static bool has_values(const Tensor *tensor) {
  if (tensor->bytes) return true;
  return fault("Unsupported", "tensor '%s' is empty, which a CompiledModel cannot hold", tensor->name);
}

// Buffers for the shapes that the inputs have now.
static bool prepare(size_t which) {
  Signature *signature = &signatures[which];
  Layout layouts[signature->outputs + 1];
  Handle needs;
  if (signature->outputs)
    TRY(GetCompiledModelOutputTensorLayouts(compiled, which, signature->outputs, layouts, true));
  for (size_t i = 0; i < signature->inputs; i++) {
    Tensor *tensor = &signature->in[i];
    release(tensor);
    tensor->bytes = bytes_of(&tensor->now);
    if (!has_values(tensor)) return false;
    TRY(GetCompiledModelInputBufferRequirements(compiled, which, i, &needs));
    TRY(CreateManagedTensorBufferFromRequirements(environment, &tensor->now, needs, &tensor->buffer));
  }
  for (size_t i = 0; i < signature->outputs; i++) {
    Tensor *tensor = &signature->out[i];
    release(tensor);
    tensor->now.layout = layouts[i];
    for (unsigned d = 0; d < layouts[i].rank; d++)
      if (layouts[i].dims[d] < 0)
        return fault("Unsupported", "output '%s' has a size that depends on the data", tensor->name);
    tensor->bytes = bytes_of(&tensor->now);
    if (!has_values(tensor)) return false;
    // LiteRT gives one memory to a tensor: an output that is an input, or another output, too.
    for (size_t j = 0; j < signature->inputs && !tensor->buffer; j++)
      if (signature->in[j].index == tensor->index) tensor->buffer = signature->in[j].buffer;
    for (size_t j = 0; j < i && !tensor->buffer; j++)
      if (signature->out[j].index == tensor->index) tensor->buffer = signature->out[j].buffer;
    tensor->shared = tensor->buffer != NULL;
    if (tensor->shared) continue;
    TRY(GetCompiledModelOutputBufferRequirements(compiled, which, i, &needs));
    TRY(CreateManagedTensorBufferFromRequirements(environment, &tensor->now, needs, &tensor->buffer));
    size_t size;
    TRY(GetTensorBufferSize(tensor->buffer, &size));
    if (size < tensor->bytes)
      return fault("RuntimeFailure", "output '%s': a buffer of %zu bytes for %zu", tensor->name, size,
                   tensor->bytes);
  }
  signature->ready = true;
  signature->checked = false;
  return true;
}

// Outputs start as this byte; 0xFF makes a float NaN, so that what is not written shows.
static const unsigned char POISONS[2] = {0xFF, 0x5A};

static bool run_once(size_t which, char **feeds, int poison, double *invoke_ms) {
  Signature *signature = &signatures[which];
  Handle in_buffers[signature->inputs + 1], out_buffers[signature->outputs + 1];
  void *memory;
  for (size_t i = 0; i < signature->outputs; i++) {
    Tensor *tensor = &signature->out[i];
    out_buffers[i] = tensor->buffer;
    if (tensor->shared) continue;
    TRY(LockTensorBuffer(tensor->buffer, &memory, WRITING));
    memset(memory, POISONS[poison], tensor->bytes);
    TRY(UnlockTensorBuffer(tensor->buffer));
  }
  for (size_t i = 0; i < signature->inputs; i++) {
    Tensor *tensor = &signature->in[i];
    in_buffers[i] = tensor->buffer;
    TRY(LockTensorBuffer(tensor->buffer, &memory, WRITING));
    memcpy(memory, feeds[i], tensor->bytes);
    TRY(UnlockTensorBuffer(tensor->buffer));
  }
  double begin = now_ms();
  TRY(RunCompiledModel(compiled, which, signature->inputs, in_buffers, signature->outputs, out_buffers));
  *invoke_ms += now_ms() - begin;
  return true;
}

static bool copy_out(Tensor *tensor, char *into) {
  void *memory;
  TRY(LockTensorBuffer(tensor->buffer, &memory, READING));
  memcpy(into, memory, tensor->bytes);
  TRY(UnlockTensorBuffer(tensor->buffer));
  return true;
}

static size_t still(const char *data, size_t bytes, size_t width, int poison, char *mark) {
  size_t found = 0;
  for (size_t i = 0; i < bytes / width; i++) {
    bool same = mark[i];
    for (size_t b = 0; same && b < width; b++)
      same = (unsigned char)data[i * width + b] == POISONS[poison];
    mark[i] = same;
    found += same;
  }
  return found;
}

// How many elements of each output keep the poison, whichever it is, at these inputs. ``results``
// are those of a run with the first poison; a second run tells a value that is equal by chance.
static bool find_unwritten(size_t which, char **feeds, char **results, size_t *counts) {
  Signature *signature = &signatures[which];
  char *marks[signature->outputs + 1];
  bool suspicious = false, good = true;
  double ignored = 0;
  for (size_t i = 0; i < signature->outputs; i++) {
    Tensor *tensor = &signature->out[i];
    size_t width = dtype_of(tensor->now.element_type)->bytes;
    marks[i] = allocate(tensor->bytes / width);
    memset(marks[i], 1, tensor->bytes / width);
    counts[i] = tensor->shared ? 0 : still(results[i], tensor->bytes, width, 0, marks[i]);
    suspicious = suspicious || counts[i];
  }
  if (suspicious) {
    good = run_once(which, feeds, 1, &ignored);
    for (size_t i = 0; good && i < signature->outputs; i++) {
      Tensor *tensor = &signature->out[i];
      size_t width = dtype_of(tensor->now.element_type)->bytes;
      char *copy = allocate(tensor->bytes);
      good = copy_out(tensor, copy);
      if (counts[i]) counts[i] = still(copy, tensor->bytes, width, 1, marks[i]);
      free(copy);
    }
  }
  for (size_t i = 0; i < signature->outputs; i++) free(marks[i]);
  return good;
}

static bool find_signature(const char *name, size_t *which) {
  for (size_t s = 0; s < signature_count; s++)
    if (!strcmp(signatures[s].name, name)) {
      *which = s;
      return true;
    }
  return fault("ValueError", "no signature '%s'", name);
}

// Puts the request's arrays in the order of the inputs, and the inputs into the arrays' shapes.
static bool take_inputs(size_t which, Json *tensors, char **arrays, size_t count, char **feeds) {
  Signature *signature = &signatures[which];
  size_t given = 0;
  for (Json *item = tensors ? tensors->first : NULL; item; item = item->next) given++;
  if (given != signature->inputs)
    return fault("ValueError", "%zu inputs given, %zu expected", given, signature->inputs);
  bool resized = false;
  for (size_t i = 0; i < signature->inputs; i++) {
    Tensor *tensor = &signature->in[i];
    Json *item = tensors->first;
    size_t position = 0;
    while (item && strcmp(get_text(item, "name", ""), tensor->name)) item = item->next, position++;
    if (!item) return fault("ValueError", "input '%s' is not given", tensor->name);
    const char *dtype = get_text(item, "dtype", "");
    if (strcmp(dtype, dtype_of(tensor->fixed.element_type)->name))
      return fault("ValueError", "input '%s': %s given, %s expected", tensor->name, dtype,
                   dtype_of(tensor->fixed.element_type)->name);
    int dims[MAX_RANK];
    unsigned rank = 0, axis = 0;
    Json *shape = get(item, "shape");
    for (Json *size = shape ? shape->first : NULL; size; size = size->next, axis++) {
      if (axis == 0 && (size_t)size->number != count)
        return fault("ValueError", "input '%s': %g samples given, %zu expected", tensor->name,
                     size->number, count);
      if (axis > 0 && rank < MAX_RANK) dims[rank++] = (int)size->number;
    }
    const Layout *fixed = &tensor->fixed.layout;
    bool fits = rank == fixed->rank && axis == rank + 1;
    for (unsigned d = 0; fits && d < rank; d++) fits = fixed->dims[d] < 0 || fixed->dims[d] == dims[d];
    if (!fits) return fault("ValueError", "input '%s': the shape does not fit", tensor->name);
    if (memcmp(tensor->now.layout.dims, dims, rank * sizeof *dims)) {
      memcpy(tensor->now.layout.dims, dims, rank * sizeof *dims);
      TRY(CompiledModelResizeInputTensor(compiled, which, i, dims, rank));
      resized = true;
    }
    feeds[i] = arrays[position];
  }
  return (signature->ready && !resized) || prepare(which);
}

typedef struct {
  double first_ms, total_ms, invoke_ms;
  size_t *unwritten;
} Figures;

static bool run(Json *request, char **arrays, size_t *which, size_t count, char ***results,
                Figures *figures) {
  if (!compiled) return fault("ValueError", "run before load");
  if (!find_signature(get_text(request, "signature", ""), which)) return false;
  Signature *signature = &signatures[*which];
  char *feeds[signature->inputs + 1], *places[signature->outputs + 1];
  if (!take_inputs(*which, get(request, "tensors"), arrays, count, feeds)) {
    signature->ready = false;
    return false;
  }
  *results = allocate((signature->outputs + 1) * sizeof **results);
  for (size_t i = 0; i < signature->outputs; i++)
    (*results)[i] = allocate(signature->out[i].bytes * count);
  figures->unwritten = allocate((signature->outputs + 1) * sizeof *figures->unwritten);
  double begin = now_ms();
  for (size_t n = 0; n < count; n++) {
    if (!run_once(*which, feeds, 0, &figures->invoke_ms)) return false;
    for (size_t i = 0; i < signature->outputs; i++) {
      places[i] = (*results)[i] + n * signature->out[i].bytes;
      if (!copy_out(&signature->out[i], places[i])) return false;
    }
    if (n == 0) {
      figures->first_ms = now_ms() - begin;
      double checking = now_ms();
      if (!signature->checked && !find_unwritten(*which, feeds, places, figures->unwritten)) return false;
      signature->checked = true;
      begin += now_ms() - checking;
    }
    for (size_t i = 0; i < signature->inputs; i++) feeds[i] += signature->in[i].bytes;
  }
  figures->total_ms = now_ms() - begin;
  return true;
}

// --------------------------------------------------------------------------------- the requests

static void answer_fault(void) {
  Text text = {0};
  put(&text, "{\"ok\": false, \"tensors\": [], \"type\": ");
  put_quoted(&text, fault_type);
  put(&text, ", \"error\": ");
  put_quoted(&text, fault_text);
  put(&text, "}");
  send_header(&text);
}

static void answer_load(Json *request) {
  double begin = now_ms();
  bool whole = false;
  if (!load(request)) {
    answer_fault();
    return;
  }
  CompiledModelIsFullyAccelerated(compiled, &whole);
  Text text = {0};
  put(&text, "{\"ok\": true, \"tensors\": [], \"load_ms\": %.3f, \"delegated\": %s, ", now_ms() - begin,
      whole ? "true" : "false");
  put_signatures(&text);
  put(&text, "}");
  send_header(&text);
}

static void answer_run(Json *request, char **arrays) {
  size_t which = 0, count = (size_t)get_number(request, "count", 1);
  char **results = NULL;
  Figures figures = {0};
  if (!run(request, arrays, &which, count, &results, &figures)) {
    answer_fault();
  } else {
    Signature *signature = &signatures[which];
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    Text text = {0};
    put(&text, "{\"ok\": true, \"times\": {\"first_ms\": %.4f, \"total_ms\": %.4f, \"invoke_ms\": %.4f}, ",
        figures.first_ms, figures.total_ms, figures.invoke_ms);
    put(&text, "\"peak_rss_kb\": %ld, \"unwritten\": {", usage.ru_maxrss);
    for (size_t i = 0, shown = 0; i < signature->outputs; i++)
      if (figures.unwritten[i]) {
        if (shown++) put(&text, ", ");
        put_quoted(&text, signature->out[i].name);
        put(&text, ": %zu", figures.unwritten[i]);
      }
    put(&text, "}, \"tensors\": [");
    for (size_t i = 0; i < signature->outputs; i++) {
      Tensor *tensor = &signature->out[i];
      put(&text, "%s{\"name\": ", i ? ", " : "");
      put_quoted(&text, tensor->name);
      put(&text, ", \"dtype\": \"%s\", \"shape\": [%zu", dtype_of(tensor->now.element_type)->name, count);
      for (unsigned d = 0; d < tensor->now.layout.rank; d++) put(&text, ", %d", tensor->now.layout.dims[d]);
      put(&text, "]}");
    }
    put(&text, "]}");
    send_header(&text);
    for (size_t i = 0; i < signature->outputs; i++)
      fwrite(results[i], 1, signature->out[i].bytes * count, answers);
  }
  for (size_t i = 0; results && i < signatures[which].outputs; i++) free(results[i]);
  free(results);
  free(figures.unwritten);
}

static void say_hello(const char *version, double began) {
  struct utsname system;
  uname(&system);
  Text text = {0};
  put(&text, "{\"ok\": true, \"op\": \"hello\", \"protocol\": 1, \"tensors\": [], \"machine\": \"%s\", ",
      system.machine);
  put(&text, "\"worker\": \"" SOURCE_SHA256 "\", \"litert\": ");
  put_quoted(&text, version);
  put(&text, ", \"start_ms\": %.3f}", now_ms() - began);
  send_header(&text);
}

int main(int count, char **words) {
  double began = now_ms();
  if (count != 3) {
    fprintf(stderr, "usage: t2e_worker LIBLITERT VERSION\n");
    return 2;
  }
  // LiteRT prints to stdout, too: the protocol gets a descriptor of its own.
  answers = fdopen(dup(1), "wb");
  requests = fdopen(dup(0), "rb");
  dup2(2, 1);
  open_litert(words[1]);
  say_hello(words[2], began);
  for (;;) {
    fflush(answers);
    uint32_t length;
    exactly(&length, 4);
    if (length > BYTES_MAX_HEADER) return 2;
    char *header = allocate((size_t)length + 1);
    exactly(header, length);
    at = header;
    Json *request = parse();
    free(header);
    Json *tensors = get(request, "tensors");
    size_t arrays = 0;
    for (Json *item = tensors ? tensors->first : NULL; item; item = item->next) arrays++;
    char **data = allocate((arrays + 1) * sizeof *data);
    size_t filled = 0;
    for (Json *item = tensors ? tensors->first : NULL; item; item = item->next) {
      size_t bytes = 0;
      for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (!strcmp(DTYPES[i].name, get_text(item, "dtype", ""))) bytes = DTYPES[i].bytes;
      if (!bytes) return 2;  // what follows cannot be read either
      Json *shape = get(item, "shape");
      for (Json *size = shape ? shape->first : NULL; size; size = size->next) bytes *= (size_t)size->number;
      data[filled] = allocate(bytes);
      exactly(data[filled++], bytes);
    }
    const char *op = get_text(request, "op", "");
    bool quit = !strcmp(op, "quit");
    if (quit) {
      Text text = {0};
      put(&text, "{\"ok\": true, \"tensors\": []}");
      send_header(&text);
    } else if (!strcmp(op, "load")) {
      answer_load(request);
    } else if (!strcmp(op, "run")) {
      answer_run(request, data);
    } else {
      fault("ValueError", "unknown op '%s'", op);
      answer_fault();
    }
    for (size_t i = 0; i < arrays; i++) free(data[i]);
    free(data);
    free_json(request);
    if (quit) break;
  }
  fflush(answers);
  return 0;
}
