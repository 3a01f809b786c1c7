#include "quire/suffix_automaton.h"

namespace quire {

SuffixAutomaton::SuffixAutomaton(int32_t max_context, int64_t* num_lookups)
    : max_context_(max_context), num_lookups_(num_lookups) {
  states_.append({0, kNone, 0, 0, 0, kNone, kNone, kNone});
}

void SuffixAutomaton::begin_sequence() {
  last_ = 0;
  context_ = {};
}

SuffixCursor SuffixAutomaton::cut(SuffixCursor cursor, int32_t length) const {
  if (cursor.length > length) cursor.length = length;
  // The state has shorter strings than its longest, and since the cursor was made some may have moved to a state of
  // their own, which then is its link.
  while (cursor.state != 0 && states_[states_[cursor.state].link].length >= cursor.length) {
    cursor.state = states_[cursor.state].link;
  }
  return cursor;
}

int32_t SuffixAutomaton::child(int32_t state, int32_t token) {
  ++*num_lookups_;
  const SuffixState& from = states_[state];
  if (from.token == token) return from.child;
  if (from.others == kNone) return kNone;
  const Edge* edge = edges_.find(state, token);
  return edge == nullptr ? kNone : edge->child;
}

void SuffixAutomaton::add_edge(int32_t state, int32_t token, int32_t child) {
  SuffixState& from = states_[state];
  if (from.token == kNone) {
    from.token = token;
    from.child = child;
    return;
  }
  // A state that branches has all its edges in the table: which of them is the most frequent changes.
  if (from.others == kNone) {
    edges_.insert({state, from.token, from.child, kNone});
    from.others = from.token;
  }
  edges_.insert({state, token, child, from.others});
  from.others = token;
}

void SuffixAutomaton::redirect(int32_t state, int32_t token, int32_t from, int32_t to) {
  // Of the states on the way to the root, those that `token` leads to `from` are the first ones.
  for (; state != kNone && child(state, token) == from; state = states_[state].link) {
    SuffixState& at = states_[state];
    if (at.token == token) at.child = to;
    if (at.others != kNone) edges_.find(state, token)->child = to;
  }
}

// The strings of `child` up to the one that `parent` and `token` make get a state of their own.
int32_t SuffixAutomaton::split(int32_t parent, int32_t token, int32_t child) {
  SuffixState shorter = states_[child];
  shorter.length = states_[parent].length + 1;
  const int32_t copy = states_.append(shorter);
  for (int32_t other = shorter.others; other != kNone;) {
    ++*num_lookups_;
    Edge edge = *edges_.find(child, other);
    other = edge.next;
    edge.state = copy;
    edges_.insert(edge);
  }
  redirect(parent, token, child, copy);
  states_[child].link = copy;
  if (context_.state == child && context_.length <= shorter.length) context_.state = copy;
  return copy;
}

// The state of the sequence and `token`.
int32_t SuffixAutomaton::extend(int32_t token, int32_t label) {
  int32_t parent = last_;
  int32_t found = child(parent, token);
  if (found != kNone) {  // another sequence began like this one
    return states_[found].length == states_[parent].length + 1 ? found : split(parent, token, found);
  }
  const int32_t added = states_.append({states_[last_].length + 1, 0, 0, label, label, kNone, kNone, kNone});
  for (; parent != kNone && (found = child(parent, token)) == kNone; parent = states_[parent].link) {
    add_edge(parent, token, added);
  }
  if (parent != kNone) {
    const bool is_whole = states_[found].length == states_[parent].length + 1;
    states_[added].link = is_whole ? found : split(parent, token, found);
  }
  return added;
}

void SuffixAutomaton::append(int32_t token, int32_t label) {
  last_ = extend(token, label);
  const SuffixCursor before = context_;
  const SuffixCursor whole{child(before.state, token), before.length + 1};
  context_ = cut(whole, max_context_ + 1);
  count(before, context_, token, label);
}

// The strings that end with the new token, `after` and its suffixes, occur once more; each continues the one that ends
// before the token, `before` and its suffixes. Both chains are walked together, the longest strings first.
void SuffixAutomaton::count(SuffixCursor before, SuffixCursor after, int32_t token, int32_t label) {
  for (int32_t state = after.state; state != 0; state = states_[state].link) {
    ++states_[state].count;
    states_[state].last_end = label;
    ++*num_lookups_;
  }
  before = cut(before);
  int32_t continued = after.state;
  for (int32_t state = before.state; state != kNone; state = states_[state].link) {
    SuffixState& from = states_[state];
    if (from.length < before.length) before.length = from.length;
    while (states_[states_[continued].link].length > before.length) continued = states_[continued].link;
    if (from.token != token && states_[continued].count >= states_[from.child].count) {
      from.token = token;
      from.child = continued;
    }
  }
}

SuffixCursor SuffixAutomaton::advance(SuffixCursor cursor, int32_t token) {
  cursor = cut(cursor);
  int32_t next = child(cursor.state, token);
  while (next == kNone && cursor.state != 0) {
    cursor.state = states_[cursor.state].link;
    cursor.length = states_[cursor.state].length;
    next = child(cursor.state, token);
  }
  if (next == kNone) return {};
  return cut({next, cursor.length + 1});
}

}  // namespace quire
