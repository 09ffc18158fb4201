/* Many readers of one file at once, for ThreadSanitizer: threads PATH */
#define KDTR_IMPLEMENTATION
#include "kdtr.h"

#include <pthread.h>

static void *read_all(void *shared)
{
    kdtr_file mine = *(const kdtr_file *)shared;
    kdtr_tensor t;
    if (kdtr_verify(&mine)) return NULL;
    return kdtr_get(&mine, "not there", &t) == KDTR_UNKNOWN ? shared : NULL;
}

int main(int n_words, char **words)
{
    kdtr_file file;
    pthread_t threads[4];
    int n_good = 0;
    if (n_words != 2 || kdtr_open(&file, words[1])) return 2;
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, read_all, &file);
    for (int i = 0; i < 4; i++) {
        void *answer = NULL;
        pthread_join(threads[i], &answer);
        n_good += answer != NULL;
    }
    kdtr_close(&file);
    return n_good == 4 ? 0 : 1;
}
