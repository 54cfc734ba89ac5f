/* The tag of a datagram: see Seal in packets.py, which says why it is what it is. */
#pragma once

#include "layout.h"

struct sums {
	__u64 first, second;
};

static __always_inline void mix(struct sums *sums, __u32 word, const __u64 by[2])
{
	sums->first += word * by[0];
	sums->second += word * by[1];
}

static __always_inline void mix_header(struct sums *sums, const struct header *header,
				       const struct job *job)
{
	const __u32 *words = (const __u32 *)header + 2;
#pragma unroll
	for (int i = 0; i < HEADER_WORDS; i++)
		mix(sums, words[i], job->multipliers[i]);
}

/* So many values, in whole blocks: behind them there are zeros. */
static __always_inline void mix_values(struct sums *sums, const __u32 *values,
				       __u32 elements, const struct job *job)
{
	const __u64(*by)[2] = job->multipliers + HEADER_WORDS;

	for (__u32 i = 0; i < ROOM; i += BLOCK) {
		if (i >= elements)
			break;
#pragma unroll
		for (int j = 0; j < BLOCK; j++)
			mix(sums, values[i + j], by[i + j]);
	}
}

#define ROTATED(word, by) ((word) >> (by) | (word) << (32 - (by)))
#define MIXED(a, b, c, d, x, y)                  \
	do {                                     \
		v[a] += v[b] + (x);              \
		v[d] = ROTATED(v[d] ^ v[a], 16); \
		v[c] += v[d];                    \
		v[b] = ROTATED(v[b] ^ v[c], 12); \
		v[a] += v[b] + (y);              \
		v[d] = ROTATED(v[d] ^ v[a], 8);  \
		v[c] += v[d];                    \
		v[b] = ROTATED(v[b] ^ v[c], 7);  \
	} while (0)
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
	do {                                                                        \
		MIXED(0, 4, 8, 12, m[s0], m[s1]);                                   \
		MIXED(1, 5, 9, 13, m[s2], m[s3]);                                   \
		MIXED(2, 6, 10, 14, m[s4], m[s5]);                                  \
		MIXED(3, 7, 11, 15, m[s6], m[s7]);                                  \
		MIXED(0, 5, 10, 15, m[s8], m[s9]);                                  \
		MIXED(1, 6, 11, 12, m[s10], m[s11]);                                \
		MIXED(2, 7, 8, 13, m[s12], m[s13]);                                 \
		MIXED(3, 4, 9, 14, m[s14], m[s15]);                                 \
	} while (0)

/* BLAKE2s (RFC 7693) of one block: 32 bytes of the job's key and 16 of sums; 8 bytes of it. */
static __noinline __u64 tag_of(const struct job *job, const struct sums *sums)
{
	if (!job || !sums)
		return 0;
	__u32 m[16] = {
		job->key[0],  job->key[1],	  job->key[2],	job->key[3],
		job->key[4],  job->key[5],	  job->key[6],	job->key[7],
		sums->first,  sums->first >> 32,  sums->second, sums->second >> 32,
	};
	__u32 v[16] = {
		0x6A09E667 ^ 0x01010008, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
		0x510E527F,		 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
		0x6A09E667,		 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
		0x510E527F ^ 48,	 0x9B05688C, ~0x1F83D9AB, 0x5BE0CD19,
	};

	ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
	ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
	ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
	ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
	ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
	ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
	ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
	ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
	ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
	ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);

	__u32 low = 0x6A09E667 ^ 0x01010008 ^ v[0] ^ v[8];
	__u32 high = 0xBB67AE85 ^ v[1] ^ v[9];
	return low | (__u64)high << 32;
}
