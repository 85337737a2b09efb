// SiLU of the causal depthwise convolution. A thread owns a channel over STRIP tokens and has its last TAPS inputs in
// registers. sizes: T, channels.
  const int tokens = sizes[0], channels = sizes[1];
  const int channel = int(threadgroup_position_in_grid.x) * THREADS + int(thread_index_in_threadgroup);
  if (channel >= channels) return;
  const int first = int(threadgroup_position_in_grid.y) * STRIP, last = min(first + STRIP, tokens);
  const size_t row = size_t(threadgroup_position_in_grid.z) * tokens;

  float w[TAPS], recent[TAPS];
  start(w, weight + channel * TAPS, recent);
  for (int s = first - (TAPS - 1); s < last; s++) {
    push(recent, s < 0 ? 0.0f : float(x[(row + s) * channels + channel]));
    if (s < first) continue;
    const float c = convolve(w, recent, reach(positions, row + s));
    y[(row + s) * channels + channel] = ELEMENT(c * sigmoid(c));
  }
