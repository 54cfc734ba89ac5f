/* The slot machine: the table in protocol.py, packet by packet instead of batch by batch.
 *
 * A slot may be dealt with on several processors at once (packets of different workers come by
 * different queues), so all of a transition happens under its lock. */
#pragma once

#include "layout.h"

/* What is to be sent, as bits; kept in the datagram on its way from `receive` to `answer`. */
enum verdict {
	SUM_TO_ALL = 1,
	SUM_TO_NEXT = 2,
	SUM_TO_WORKER = 4,
	FREED_TO_ALL = 8,
	FREED_TO_WORKER = 16,
	BACK = 32,
};

/* why: what a datagram that changes nothing and is not answered is counted as. */
struct outcome {
	__u32 verdict;
	__u32 why;
	__u32 taken;
};

static __always_inline struct outcome dropped(enum count why)
{
	return (struct outcome){ .why = why };
}

static __always_inline struct outcome answered(__u32 verdict)
{
	return (struct outcome){ .verdict = verdict };
}

/* A slot that another job has used is as new; whether *job* is not over itself. */
static __always_inline int own(struct slot *slot, const struct job *job)
{
	if (slot->serial == job->serial)
		return 1;
	if (slot->serial > job->serial)
		return 0;
	slot->serial = job->serial;
#pragma unroll
	for (int i = 0; i < 2; i++) {
		slot->versions[i].round = i - 2;
		slot->versions[i].seen = job->all;
		slot->versions[i].elements = 0;
		slot->versions[i].exponent = 0;
		slot->versions[i].flags = 0;
		slot->versions[i].over = 1;
	}
	return 1;
}

/* In whole blocks: behind the values there are zeros, in both. */
static __always_inline void add(__u32 *sums, const __u32 *values, __u32 elements, int writes)
{
	for (__u32 i = 0; i < ROOM; i += BLOCK) {
		if (i >= elements)
			break;
#pragma unroll
		for (int j = 0; j < BLOCK; j++)
			sums[i + j] = writes ? values[i + j] : sums[i + j] + values[i + j];
	}
}

/* A worker has its bit and no other; who merges has some of the job's. */
static __always_inline int has_own_bits(const struct header *header, __u64 all)
{
	__u64 bits = header->bitmap;

	if (!bits || bits & ~all)
		return 0;
	return header->worker == NOBODY ||
	       bits == 1ull << (header->worker % MOST_WORKERS);
}

static __always_inline struct outcome contribute(struct slot *slot, const struct job *job,
						 const struct header *header,
						 const __u32 *values)
{
	__u64 bits = header->bitmap, all = job->all;
	__u32 odd = header->round & 1;
	__s64 round = header->round;
	struct version *mine = odd ? &slot->versions[1] : &slot->versions[0];
	struct version *other = odd ? &slot->versions[0] : &slot->versions[1];
	__u8 mode = header->flags & MODES;
	__u16 elements = header->elements, stored = mine->elements;
	__u64 seen = mine->seen, common = seen & bits;

	int joins = round == mine->round;
	int begins = round == mine->round + 2 && other->round == round - 1 && other->over;
	if (!joins && !begins)
		return dropped(round < mine->round ? LATE : EARLY);
	if (!begins && (mode != mine->flags ||
			(elements && stored && elements != stored)))
		return dropped(DISAGREEING);

	int whole = joins && bits == all && seen != all && common;
	if (joins && common && !whole) {
		if (common != bits)
			return dropped(OVERLAPPING);
		if (seen != all)
			return dropped(REPEATED);
		__u32 verdict = mode != FORWARD ? SUM_TO_WORKER : 0;
		if (mode)
			verdict |= mine->over ? FREED_TO_WORKER : SUM_TO_NEXT;
		return answered(verdict);
	}

	if (begins || whole) {
		stored = 0;
		seen = 0;
		mine->exponent = header->exponent;
	} else if (header->exponent > mine->exponent) {
		mine->exponent = header->exponent;
	}
	if (elements) {
		__u32 *sums = odd ? slot->values[1] : slot->values[0];
		if (stored)
			add(sums, values, elements, 0);
		else
			add(sums, values, elements, 1);
		stored = elements;
	}
	seen |= bits;
	mine->round = round;
	mine->seen = seen;
	mine->elements = stored;
	mine->flags = mode;
	mine->over = seen == all && !mode;

	struct outcome outcome = { .taken = 1 };
	if (seen == all)
		outcome.verdict = (mode != FORWARD ? SUM_TO_ALL : 0) |
				  (mode ? SUM_TO_NEXT : 0);
	return outcome;
}

/* The next agent has the sum, or wants it again. */
static __always_inline struct outcome told(struct slot *slot, const struct job *job,
					   const struct header *header)
{
	struct version *mine = header->round & 1 ? &slot->versions[1] : &slot->versions[0];
	int complete = mine->round == header->round && mine->seen == job->all;

	if (header->kind == RECEIVED) {
		if (!complete || !mine->flags || mine->over)
			return dropped(RECEIVED_AGAIN);
		mine->over = 1;
		return answered(FREED_TO_ALL);
	}
	int known = header->worker < MOST_WORKERS && job->all >> header->worker & 1;
	if (complete && known && mine->flags != FORWARD)
		return answered(SUM_TO_WORKER);
	if (complete && !mine->over)
		return answered(SUM_TO_NEXT);
	return dropped(WANTED_IN_VAIN);
}
