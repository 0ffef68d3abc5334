// Runs one .tflite file through LiteRT.js (WebAssembly) in Node: node worker.mjs NODE_MODULES BUILD
//
// The protocol is that of worker.py, on stdin and stdout:
//
//     u32 little-endian length | UTF-8 JSON header | raw little-endian tensors in the header's order
//
// It goes through the bindings under LiteRT.js's own Tensor class, which takes no int8, int16, int64
// and bool; the load answer notes where a web page would meet that. Those bindings check no shape: a
// wrong one gives stale memory as the output (2.5.3), so shapes are checked here.

import fs from 'node:fs';
import path from 'node:path';
import {createRequire} from 'node:module';
import {pathToFileURL} from 'node:url';

const [modules, build] = process.argv.slice(2);
const core = path.resolve(modules, '@litertjs/core');
const started = performance.now();

// stdout belongs to the protocol. LiteRT.js looks for a WebGPU device and an NPU, and says that Node
// has none: that would stand at the end of every error's text.
const NOISE = ['Failed to create default WebGPU device', 'NPU accelerator could not be loaded'];
for (const name of ['log', 'info', 'warn', 'error', 'debug']) {
  console[name] = (...words) => {
    const line = words.join(' ');
    if (!NOISE.some((noise) => line.includes(noise))) fs.writeSync(2, line + '\n');
  };
}

// ------------------------------------------------------------------------------------- the pipe

function exactly(count) {
  const data = Buffer.allocUnsafe(count);
  for (let have = 0; have < count; ) {
    const got = fs.readSync(0, data, have, count - have, null);
    if (got === 0) process.exit(0); // the parent is gone
    have += got;
  }
  return data;
}

function write(data) {
  for (let have = 0; have < data.length; ) have += fs.writeSync(1, data, have);
}

function send(header, tensors = []) {
  header.tensors = tensors.map(({name, dtype, shape}) => ({name, dtype, shape}));
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  write(Buffer.concat([length, text]));
  for (const tensor of tensors) for (const part of tensor.parts) write(part);
}

function receive() {
  const header = JSON.parse(exactly(exactly(4).readUInt32LE()).toString('utf8'));
  const tensors = new Map();
  for (const {name, dtype, shape} of header.tensors ?? []) {
    const size = WIDTHS[dtype];
    if (size === undefined) throw new Error(`tensor '${name}' has the unknown type ${dtype}`);
    const data = exactly(shape.reduce((all, one) => all * one, size));
    tensors.set(name, {dtype, shape, data});
  }
  return [header, tensors];
}

// ------------------------------------------------------------------------------------ the model

// litert::ElementType (litert_model_types.h) -> NumPy's name and the size of an element.
const ELEMENTS = {
  1: ['float32', 4], 2: ['int32', 4], 3: ['uint8', 1], 4: ['int64', 8], 6: ['bool', 1],
  7: ['int16', 2], 9: ['int8', 1], 10: ['float16', 2], 11: ['float64', 8], 13: ['uint64', 8],
  16: ['uint32', 4], 17: ['uint16', 2],
};
const WIDTHS = Object.fromEntries(Object.values(ELEMENTS));
const OWN_TYPES = ['float32', 'int32', 'uint8']; // what LiteRT.js's Tensor class takes

// A browser has these; LiteRT.js loads its WebAssembly as a worker's script.
globalThis.self = globalThis;
globalThis.window = globalThis;
globalThis.require = createRequire(import.meta.url);
globalThis.__dirname = path.join(core, 'wasm');
globalThis.__filename = path.join(core, 'wasm', 'worker.js');
globalThis.importScripts = (script) => (0, eval)(fs.readFileSync(String(script), 'utf8'));

// Emscripten takes a refusal to grow as "out of memory", as in a browser's tab.
let limit = Infinity;
let refused = false;
const grow = WebAssembly.Memory.prototype.grow;
WebAssembly.Memory.prototype.grow = function (pages) {
  if (this.buffer.byteLength + pages * 65536 > limit) {
    refused = true;
    throw new RangeError('the memory limit is reached');
  }
  return grow.call(this, pages);
};

function array(vector) {
  const items = Array.from({length: vector.size()}, (_, position) => vector.get(position));
  vector.delete();
  return items;
}

function typeOf(type, name) {
  const element = type.elementType().value;
  if (!(element in ELEMENTS)) throw new Error(`tensor '${name}' has an unknown type (${element})`);
  const layout = type.layout();
  const shape = array(layout.dimensions());
  layout.delete();
  return {name, dtype: ELEMENTS[element][0], element, shape};
}

// What the bindings do not tell, from the file's own tables (schema.fbs of LiteRT): signature ->
// tensor -> {sizes, scale, zero_point}; sizes has -1 where a size may change.
function tablesOf(data) {
  const u32 = (at) => data.readUInt32LE(at);
  const table = (at) => at + u32(at);
  const field = (from, slot) => {
    const entries = from - data.readInt32LE(from);
    const size = data.readUInt16LE(entries);
    const offset = 4 + 2 * slot < size ? data.readUInt16LE(entries + 4 + 2 * slot) : 0;
    return offset && from + offset;
  };
  const vector = (from, slot, width, read) => {
    const at = field(from, slot);
    if (!at) return [];
    const begin = table(at);
    return Array.from({length: u32(begin)}, (_, index) => read(begin + 4 + width * index));
  };
  const text = (from, slot) => {
    const at = field(from, slot);
    return at ? data.toString('utf8', table(at) + 4, table(at) + 4 + u32(table(at))) : '';
  };
  const number = (from, slot) => {
    const at = field(from, slot);
    return at ? u32(at) : 0;
  };
  const i32 = (at) => data.readInt32LE(at);
  const model = table(0);
  const graphs = vector(model, 2, 4, table).map((graph) =>
    vector(graph, 0, 4, table).map((tensor) => {
      const found = {sizes: vector(tensor, 7, 4, i32)};
      if (!found.sizes.length) found.sizes = vector(tensor, 0, 4, i32);
      const quantization = field(tensor, 4) && table(field(tensor, 4));
      const scale = quantization ? vector(quantization, 2, 4, (at) => data.readFloatLE(at)) : [];
      if (scale.length === 1) {
        found.scale = scale[0];
        [found.zero_point = 0] = vector(quantization, 3, 8, (at) => Number(data.readBigInt64LE(at)));
      }
      return found;
    }));
  return Object.fromEntries(vector(model, 7, 4, table).map((entry) => {
    const graph = graphs[number(entry, 4)];
    const named = (slot) =>
      Object.fromEntries(vector(entry, slot, 4, table).map((map) =>
        [text(map, 0), graph[number(map, 1)]]));
    return [text(entry, 2), {inputs: named(0), outputs: named(1)}];
  }));
}

class Model {
  constructor(wasm, environment, header) {
    this.wasm = wasm;
    this.environment = environment;
    if ((header.kernels ?? 'default') !== 'default')
      throw new Error(`LiteRT.js has no choice of kernels, '${header.kernels}' was asked for`);
    if ((header.threads ?? 1) !== 1) throw new Error('LiteRT.js runs one thread here');
    if (header.taps?.length) throw new Error('LiteRT.js does not give values inside the graph');
    limit = header.limit_bytes ?? Infinity;
    const data = fs.readFileSync(header.path);
    const place = wasm._malloc(data.length); // the model reads its weights there: never freed
    if (!place) throw new Error(`no memory for the file's ${data.length} bytes`);
    wasm.HEAPU8.set(data, place);
    this.model = wasm.loadModel(environment, place, data.length);
    this.signatures = Array.from({length: this.model.getNumSignatures()}, (_, index) => {
      const signature = this.model.getSignature(index);
      const described = {
        name: signature.key(),
        inputs: array(signature.inputNames()).map((name, at) =>
          typeOf(this.model.getInputTensorType(index, at), name)),
        outputs: array(signature.outputNames()).map((name, at) =>
          typeOf(this.model.getOutputTensorType(index, at), name)),
      };
      signature.delete();
      return described;
    });
    const tables = tablesOf(data); // LiteRT has found the file well-formed
    for (const {name, inputs, outputs} of this.signatures) {
      for (const type of inputs) Object.assign(type, tables[name]?.inputs[type.name]);
      for (const type of outputs) Object.assign(type, tables[name]?.outputs[type.name]);
    }
  }

  async compile() {
    const begin = performance.now();
    this.compiled = await this.wasm.compileModel(this.environment, this.model, {
      environment: this.environment,
      accelerator: 'wasm',
      cpuOptions: {numThreads: 1},
      gpuOptions: {},
      webNNOptions: {},
    });
    this.load_ms = performance.now() - begin;
  }

  describe() {
    const plain = ({name, dtype, shape, sizes = shape, scale, zero_point}) =>
      ({name, dtype, shape: sizes, scale, zero_point});
    return this.signatures.map(({name, inputs, outputs}) => ({
      name, inputs: inputs.map(plain), outputs: outputs.map(plain),
    }));
  }

  notes() {
    const odd = this.signatures.flatMap(({inputs, outputs}) =>
      [...inputs, ...outputs].filter(({dtype}) => !OWN_TYPES.includes(dtype)));
    if (!odd.length) return [];
    const names = odd.map(({name, dtype}) => `'${name}' (${dtype})`).join(', ');
    return [
      `LiteRT.js's Tensor class takes float32, int32 and uint8 only: a web page cannot hand over ` +
      `${names}; keep the model's inputs and outputs in float32 there`,
    ];
  }

  buffer({element, dtype, shape}) {
    const {wasm} = this;
    const dimensions = new wasm.VectorInt32();
    for (const size of shape) dimensions.push_back(size);
    const layout = wasm.LiteRtLayout.create(dimensions);
    const ranked = wasm.LiteRtRankedTensorType.create({value: element}, layout);
    const bytes = shape.reduce((all, one) => all * one, WIDTHS[dtype]);
    const made = wasm.LiteRtTensorBuffer.createManaged(
      this.environment, wasm.LiteRtTensorBufferType.HOST_MEMORY, ranked, bytes);
    for (const used of [ranked, layout, dimensions]) used.delete();
    return made;
  }

  async run(wanted, count, given) {
    const {wasm} = this;
    const index = this.signatures.findIndex(({name}) => name === wanted);
    if (index < 0) throw new Error(`no signature '${wanted}'`);
    const {inputs, outputs} = this.signatures[index];
    const names = inputs.map(({name}) => name);
    if (names.length !== given.size || !names.every((name) => given.has(name)))
      throw new Error(`inputs ${[...given.keys()]} given, ${names} expected`);
    const feeds = inputs.map((type) => {
      const {dtype, shape, data} = given.get(type.name);
      if (dtype !== type.dtype)
        throw new Error(`input '${type.name}': ${dtype} given, ${type.dtype} expected`);
      const one = shape.slice(1);
      if (String(one) !== String(type.shape)) {
        const fixed = type.sizes?.includes(-1)
          ? ': LiteRT.js cannot change the sizes that the file was exported with'
          : '';
        throw new Error(
          `input '${type.name}': shape [${one}] given, [${type.shape}] expected${fixed}`);
      }
      const bytes = data.length / count;
      if (!bytes) throw new Error(`input '${type.name}' has no elements: LiteRT.js cannot take that`);
      return {buffer: this.buffer(type), data, bytes};
    });
    const results = outputs.map(({name, dtype}) => ({name, dtype, shape: null, parts: []}));
    const {READ, WRITE} = wasm.LiteRtTensorBufferLockMode;
    const begin = performance.now();
    let first = 0;
    try {
      for (let position = 0; position < count; position++) {
        for (const {buffer, data, bytes} of feeds) {
          const place = buffer.lock(WRITE);
          wasm.HEAPU8.set(data.subarray(position * bytes, (position + 1) * bytes), place);
          buffer.unlock();
        }
        const made = await this.compiled.run(index, feeds.map(({buffer}) => buffer));
        made.forEach((buffer, at) => {
          const type = buffer.tensorType();
          const {shape} = typeOf(type, results[at].name);
          type.delete();
          const before = results[at].shape;
          if (before && String(before) !== String(shape))
            throw new Error(`output '${results[at].name}' changes its shape: [${before}], [${shape}]`);
          results[at].shape = shape;
          const place = buffer.lock(READ);
          const bytes = buffer.packedSize();
          results[at].parts.push(wasm.HEAPU8.slice(place, place + bytes));
          buffer.unlock();
          buffer.delete();
        });
        if (position === 0) first = performance.now() - begin;
      }
    } finally {
      for (const {buffer} of feeds) buffer.delete();
    }
    const times = {first_ms: first, total_ms: performance.now() - begin};
    for (const result of results) result.shape = [count, ...(result.shape ?? [])];
    return [times, results];
  }
}

// ------------------------------------------------------------------------------------------ main

function words(error) {
  if (refused) return ['MemoryError', `the memory limit of ${limit / 2 ** 20} MiB is reached`];
  if (!(error instanceof Error)) return ['Error', String(error)];
  return [error.constructor.name, error.message.trim().split(/\s*\n\s*/).join(' / ')];
}

const {loadLiteRt} = await import(pathToFileURL(path.join(core, 'dist', 'index.js')));
const litert = await loadLiteRt(path.join(core, 'wasm', build), {});
const version = JSON.parse(fs.readFileSync(path.join(core, 'package.json'), 'utf8')).version;
send({
  ok: true,
  op: 'hello',
  protocol: 1,
  machine: 'wasm32',
  litert: `LiteRT.js ${version}`,
  node: process.versions.node,
  start_ms: performance.now() - started,
});
let model = null;
for (;;) {
  const [header, tensors] = receive();
  try {
    if (header.op === 'quit') {
      send({ok: true});
      break;
    } else if (header.op === 'load') {
      model = new Model(litert.liteRtWasm, litert.getDefaultEnvironment().liteRtEnvironment, header);
      await model.compile();
      send({
        ok: true,
        load_ms: model.load_ms,
        signatures: model.describe(),
        delegated: model.compiled.isFullyAccelerated(),
        notes: model.notes(),
      });
    } else if (header.op === 'run') {
      if (model === null) throw new Error('run before load');
      const [times, results] = await model.run(header.signature, header.count, tensors);
      send({ok: true, times, peak_rss_kb: process.resourceUsage().maxRSS}, results);
    } else {
      throw new Error(`unknown op '${header.op}'`);
    }
  } catch (error) {
    const [type, text] = words(error);
    if (error instanceof WebAssembly.RuntimeError) {
      // A trap or an abort: what is in the memory now cannot be trusted.
      fs.writeSync(2, `${type}: ${text}\n`);
      process.exit(70);
    }
    send({ok: false, type, error: text});
  }
}
process.exit(0);
