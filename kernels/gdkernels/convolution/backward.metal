// Gradient of x. A thread owns a channel over STRIP tokens and goes on for the TAPS - 1 after them, which they reach.
// sizes: T, channels.
  const int tokens = sizes[0], channels = sizes[1];
  const int channel = int(threadgroup_position_in_grid.x) * THREADS + int(thread_index_in_threadgroup);
  if (channel >= channels) return;
  const int first = int(threadgroup_position_in_grid.y) * STRIP, last = min(first + STRIP, tokens);
  const int end = min(last + TAPS - 1, tokens);
  const size_t row = size_t(threadgroup_position_in_grid.z) * tokens;

  // open[i] is the gradient so far of the input in recent[i].
  float w[TAPS], recent[TAPS], open[TAPS];
  start(w, weight + channel * TAPS, recent);
  UNROLL
  for (int i = 0; i < TAPS; i++) open[i] = 0.0f;
  for (int s = first - (TAPS - 1); s < end; s++) {
    push(recent, s < 0 ? 0.0f : float(x[(row + s) * channels + channel]));
    push(open, 0.0f);
    if (s < first) continue;
    const int back = reach(positions, row + s);
    const float c = convolve(w, recent, back), p = sigmoid(c);
    const float dc = float(dy[(row + s) * channels + channel]) * p * (1.0f + c * (1.0f - p));
    UNROLL
    for (int i = 0; i < TAPS; i++) open[i] += TAPS - 1 - i <= back ? w[i] * dc : 0.0f;
    if (s - (TAPS - 1) >= first) dx[(row + s - (TAPS - 1)) * channels + channel] = ELEMENT(open[0]);
  }
  // At the end of the row nothing more reaches the last inputs.
  UNROLL
  for (int i = 1; i < TAPS; i++) {
    const int s = end - TAPS + i;
    if (s >= first && s < last) dx[(row + s) * channels + channel] = ELEMENT(open[i]);
  }
