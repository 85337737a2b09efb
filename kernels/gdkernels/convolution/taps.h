// The last TAPS inputs of a channel, the newest at the end.

template <typename P>
METAL_FUNC void start(thread float* w, P weight, thread float* recent) {
  UNROLL
  for (int i = 0; i < TAPS; i++) {
    w[i] = float(weight[i]);
    recent[i] = 0.0f;
  }
}

METAL_FUNC void push(thread float* values, float next) {
  UNROLL
  for (int i = 0; i + 1 < TAPS; i++) values[i] = values[i + 1];
  values[TAPS - 1] = next;
}

// How many tokens back the document of a token goes, as far as it matters.
template <typename P>
METAL_FUNC int reach(P positions, size_t token) {
#if POSITIONS
  return positions[token];
#else
  return TAPS;
#endif
}

// Zero by choice, not by a product: nothing of another document gets through.
METAL_FUNC float convolve(const thread float* w, const thread float* recent, int back) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < TAPS; i++) sum += TAPS - 1 - i <= back ? w[i] * recent[i] : 0.0f;
  return sum;
}

METAL_FUNC float sigmoid(float c) {
  const float e = decay_exp(c < 0.0f ? c : -c);
  return (c < 0.0f ? e : 1.0f) / (1.0f + e);
}
