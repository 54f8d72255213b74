"use strict";
/* What a format does to a histogram of magnitudes at a loss scale: the figures of ampdoctor's `numerics.Histogram`,
   from the bins that the report carries. A test holds the two against each other.

   Bin i holds the magnitudes in (edge(i), edge(i + 1)]: 8 exponent bits and 3 mantissa bits of a float32, so that
   floor(i / 8) - 127 is the exponent. Inside a bin the values lie evenly on the source dtype's grid; the smallest and
   the largest magnitude are known exactly and count as themselves. */

ampdoctor.histogram = (() => {
  const BEYOND_FP32 = 2040;
  const FIRST_BITS = 4;
  const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const word = new Uint32Array(1);
  const float = new Float32Array(word.buffer);

  function edge(index) {
    if (index >= BEYOND_FP32) return index === BEYOND_FP32 ? 2 ** 128 : Infinity;
    word[0] = index << 20;
    return float[0];
  }

  function binOf(magnitude) {
    let low = 0, high = BEYOND_FP32;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (edge(middle + 1) >= magnitude) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Make a histogram of the page's form ready: [first bin, amin, amax, bits, log2 of the spacing, counts]. A count has
   *  five bits a letter, the low ones first; a letter after which more follow has the sixth. */
  function read([first, amin, amax, bits, spacing, letters]) {
    const counts = new Map();
    let bin = first, many = 0, unit = 1;
    for (const letter of letters) {
      const digit = DIGITS.indexOf(letter);
      many += (digit & 31) * unit;
      unit *= 32;
      if (digit & 32) continue;
      if (many > 0) counts.set(bin, many);
      [bin, many, unit] = [bin + 1, 0, 1];
    }
    return ready({ counts, amin, amax, bits, spacing: 2 ** spacing });
  }

  /** The histogram of all elements of several. */
  function merge(histograms) {
    const counts = new Map();
    for (const one of histograms) for (const [bin, many] of one.counts) counts.set(bin, (counts.get(bin) ?? 0) + many);
    const [amin, spacing] = ["amin", "spacing"].map((name) => Math.min(...histograms.map((one) => one[name])));
    const [amax, bits] = ["amax", "bits"].map((name) => Math.max(...histograms.map((one) => one[name])));
    return ready({ counts, amin, amax, bits, spacing });
  }

  function ready(histogram) {
    const { counts, amin, amax } = histogram;
    const total = [...counts.values()].reduce((sum, many) => sum + many, 0);
    const points = amin === amax ? [[amin, total]] : [[amin, 1], [amax, 1]];
    return { ...histogram, total, points, grid: grid({ ...histogram, points }) };
  }

  /** The occupied bins without the extremes: first and last value, counted in steps from the bin's lower edge. */
  function grid({ counts, amin, amax, bits, spacing, points }) {
    const rest = new Map(counts);
    for (const [magnitude, many] of points) {
      const bin = binOf(magnitude);
      rest.set(bin, (rest.get(bin) ?? 0) - many);
    }
    return [...rest].filter(([, many]) => many > 0).map(([bin, many]) => {
      const low = edge(bin);
      const high = bin === BEYOND_FP32 ? Math.max(amax, 2 ** 129) : edge(bin + 1);
      const width = high - low;
      const step = Math.min(Math.max(width * 2 ** -Math.max(bits - FIRST_BITS, 0), spacing), width);
      const first = Math.max(Math.ceil((Math.max(low, amin) - low) / step), 1);
      const last = Math.max(Math.floor((Math.min(high, amax) - low) / step), first);
      return { low, step, first, last, many };
    });
  }

  function share(histogram, threshold, inclusive) {
    let below = 0;
    for (const { low, step, first, last, many } of histogram.grid) {
      const position = (threshold - low) / step;
      const reached = inclusive ? Math.floor(position) : Math.ceil(position) - 1;
      below += (many * Math.min(Math.max(reached - first + 1, 0), last - first + 1)) / (last - first + 1);
    }
    for (const [magnitude, many] of histogram.points) {
      if (inclusive ? magnitude <= threshold : magnitude < threshold) below += many;
    }
    return below / histogram.total;
  }

  /** Shares of the nonzero finite values, 0 to 1, once multiplied by `factor`; headroom in binades. */
  function figures(histogram, format, factor) {
    const flushed = share(histogram, format.flush_at / factor, true);
    const below = share(histogram, format.min_normal / factor, false);
    const beyond = histogram.amax * factor >= format.overflow_at;
    return {
      flushed,
      subnormal: Math.max(below - flushed, 0),
      overflowed: beyond
        ? Math.max(1 - share(histogram, format.overflow_at / factor, false), 1 / histogram.total)
        : 0,
      headroom: Math.log2(format.max) - Math.log2(histogram.amax) - Math.log2(factor),
    };
  }

  /** Counts by exponent e: the magnitudes in (2^e, 2^(e + 1)]. */
  function binades(histogram) {
    const found = new Map();
    for (const [bin, many] of histogram.counts) {
      const exponent = Math.floor(bin / 8) - 127;
      found.set(exponent, (found.get(exponent) ?? 0) + many);
    }
    return [...found].sort(([a], [b]) => a - b);
  }

  return { read, merge, figures, binades };
})();
